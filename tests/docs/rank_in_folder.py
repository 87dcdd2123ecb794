"""A rank of a page's program: goes to the page's folder and runs the script there, ``FOLDER SCRIPT ARGUMENTS``."""

import os
import runpy
import sys

os.chdir(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path[0] = os.getcwd()  # noqa: PTH109 - a string, as python sets it
runpy.run_path(sys.argv[0], run_name="__main__")
