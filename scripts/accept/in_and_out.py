"""The numbers of what goes in and what comes out. Called by scripts/accept.sh. A part is a module in_and_out_<part>.py."""
import glob
import importlib
import os
import sys

from runner import run_parts

parts = []
for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "in_and_out_*.py"))):
    name = os.path.basename(path)[len("in_and_out_"):-len(".py")]
    parts.append((name, True, getattr(importlib.import_module("in_and_out_" + name), "part_" + name)))
sys.exit(run_parts(parts))
