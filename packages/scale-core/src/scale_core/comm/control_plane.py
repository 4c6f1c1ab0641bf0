"""What ranks tell each other in a few integers or words: for checks and errors, not for data.

Every rank's record reaches every rank in few small messages. What is compared so often has to be fast, and it has to
end with an error, never with an abort, where the ranks are at different places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scale_core.comm.collectives import HOST, LONGEST_RECORD, receive_all, send_all
from scale_core.comm.group import Group
from scale_core.comm.work import wait_for


def exchange(record: Sequence[int], group: Group, *, limit_seconds: float | None = None) -> list[list[int]]:
    """Returns every rank's record, by rank: a few integers, for checks and not for data.

    ceil(log2 W) rounds of one small message (Bruck et al., 1997), on the host whatever the group computes on. Under the
    "fake" backend the others are taken to say what this rank says.

    Args:
        record: [n] integers of 64 bits; ranks whose n differ time out.
        group: The ranks that take part.
        limit_seconds: As in `Pending.wait`.

    Raises:
        TransferError: A peer did not answer.
        ValueError: n is above a million.
    """
    if len(record) > LONGEST_RECORD:
        raise ValueError(f"exchange: expected at most {LONGEST_RECORD} integers, got {len(record)}")
    if group.size == 1 or group.backend == "fake":
        return [list(record) for _ in range(group.size)]
    # Row i is the record of rank + i.
    known = torch.tensor(record, dtype=torch.int64, device=HOST).repeat(group.size, 1)
    have = 1
    while have < group.size:
        count = min(have, group.size - have)
        below, above = (group.rank - have) % group.size, (group.rank + have) % group.size
        works = receive_all(group, {above: known[have : have + count]}, 1 + len(record))
        works += send_all(group, {below: known[:count]}, 1 + len(record))
        for peer, work in works:
            wait_for("exchange", peer, work, limit_seconds)
        have += count
    return known.roll(group.rank, dims=0).tolist()


def exchange_text(text: str, group: Group, *, limit_seconds: float | None = None) -> list[str]:
    """Returns every rank's text, by rank. For the words of an error, so size matters more than speed.

    Raises:
        TransferError: A peer did not answer.
        ValueError: A text is longer than 8 MB.
    """
    data = text.encode(errors="surrogatepass")  # A path may hold what is no character.
    lengths = [row[0] for row in exchange([len(data)], group, limit_seconds=limit_seconds)]
    words = -(-max(lengths) // 8)
    padded = data.ljust(words * 8, b"\0")
    record = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    rows = exchange(record, group, limit_seconds=limit_seconds)
    texts = (b"".join(word.to_bytes(8, "little", signed=True) for word in row) for row in rows)
    return [raw[:length].decode(errors="surrogatepass") for raw, length in zip(texts, lengths, strict=True)]
