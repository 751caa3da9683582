"""The numbers of the data path. Called by scripts/accept.sh."""
import sys

from runner import parts_in_files, run_parts

sys.exit(run_parts(parts_in_files("data_path")))
