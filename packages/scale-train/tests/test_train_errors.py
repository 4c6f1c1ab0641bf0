import pickle

from scale_train.errors import InputError, Interrupted, TrainingDiverged


def test_wrong_input_is_one_line_and_can_be_pickled():
    error = InputError("first\n  second")
    assert str(error) == "first second"
    assert str(pickle.loads(pickle.dumps(error))) == "first second"


def test_exit_codes_are_those_that_shells_know():
    assert InputError("").exit_code == 2
    assert TrainingDiverged("").exit_code == 1
    assert Interrupted(2, "").exit_code == 130
    assert Interrupted(15, "").exit_code == 143
