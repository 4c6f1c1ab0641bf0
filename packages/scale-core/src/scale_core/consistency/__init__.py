"""Checks that all ranks run the same, the error where they don't, and one error on all ranks where one fails.

Begin with `contract`, which records and compares the events of the ranks; `execution_order` says what an event is,
`contract_errors` has the errors, `flight_recorder` what each rank did last. `all_ranks` raises an error of one rank on
all, `backward_pass` ends a backward pass in the same way on all, `late_ranks` says for whom the others wait, and
`divergence` compares bits.
"""
