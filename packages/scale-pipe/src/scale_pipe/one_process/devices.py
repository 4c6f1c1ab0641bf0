"""The devices that a pipeline is given: each with its index, and each of them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Device = torch.device | str | int


def devices_of(devices: Iterable[Device] | None, balance: Sequence[int] | None) -> list[torch.device]:
    """Returns the devices that are meant; without an index, one device would have two names.

    Args:
        devices: As a pipeline is given them. None is all accelerators, or the CPU where there is none.
        balance: So many partitions may share the CPU.

    Raises:
        TypeError: They are no list.
        ValueError: There is no such device.
    """
    if devices is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return [torch.device("cpu")] * max(1, len(balance or ()))
        return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    if isinstance(devices, str | torch.device) or not isinstance(devices, Iterable):
        raise TypeError(f"devices are a list, one for each partition, but got {devices!r}: write devices=[{devices!r}]")
    return [_device(place, device) for place, device in enumerate(devices)]


def _device(place: int, given: Device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{_missing(place, given)} ({str(error).splitlines()[0]})") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device.type in ("cpu", "meta") or (accelerator is not None and device.type != accelerator.type):
        return device  # Whether one of a third kind is there, the copy to it will say.
    if accelerator is None or (device.index or 0) >= torch.accelerator.device_count():
        raise ValueError(_missing(place, given))
    unnumbered = torch.device(device.type)
    return torch.device(device.type, torch.accelerator.current_device_index()) if device == unnumbered else device


def _missing(place: int, given: Device) -> str:
    count = torch.accelerator.device_count()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = f"{count} of the type {accelerator.type!r}" if accelerator is not None else "no accelerators"
    return (
        f"there is no device {given!r}, as devices[{place}] names it: this process sees {there}, and the CPU, which "
        'may stand several times: devices=["cpu", "cpu"]'
    )
