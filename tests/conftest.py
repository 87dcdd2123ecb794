"""What every test starts with: one thread for arithmetic (two cores are shared by all ranks) and a printed seed."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis

hypothesis.settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("house")
