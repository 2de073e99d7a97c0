"""Triton kernels on the CPU, in Triton's interpreter. It replaces the whole of Triton when that is imported, so these
tests have a process of their own: kernels/test_interpreted.py runs them with TRITON_INTERPRET=1, as anyone may."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
