import subprocess
import sys

import pytest

# A finder that is asked for a module before anybody else is: there somebody presses Ctrl-C.
PROGRAM = """
import os, runpy, signal, sys

sys.argv[1:], awaited = ["lm"], sys.argv[1]

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
runpy.run_module("scale_train", run_name="__main__")
"""


@pytest.mark.fault(93)
@pytest.mark.parametrize("module", ["tyro", "torch"])
def test_ctrl_c_while_something_is_loading_is_code_130(module):
    ended = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
