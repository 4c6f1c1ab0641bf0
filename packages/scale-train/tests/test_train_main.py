import subprocess
import sys

# A finder that is asked for torch before anybody else is: there somebody presses Ctrl-C.
PROGRAM = """
import os, runpy, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
runpy.run_module("scale_train", run_name="__main__")
"""


def test_ctrl_c_while_torch_is_loading_is_code_130_and_no_traceback():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
