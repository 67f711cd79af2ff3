"""The whole fault campaign: 50,000 simulated schedules, then a quarter of an hour of faults on three real servers.

    python tests/campaign.py                              # about 25 minutes on two cores
    SIM_COUNT=2000 CLUSTER_SECONDS=120 python tests/campaign.py

Each part takes a new seed and prints it (``SIM_SEED`` and ``CLUSTER_SEED`` repeat one), and ends with a table of its
figures. It ends with another status than 0 where a promise was broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def main() -> int:
    """The command."""
    seed = ["--seed", os.environ["SIM_SEED"]] if "SIM_SEED" in os.environ else []
    simulated = [str(_HERE / "simulation" / "sim_campaign.py"), os.environ.get("SIM_COUNT", "50000"), *seed]
    clustered = ["-m", "pytest", "-q", "-m", "cluster", str(_HERE / "cluster")]
    print("== schedules, simulated", flush=True)
    walked = subprocess.run([sys.executable, *simulated], check=False).returncode
    print("\n== faults, on three servers", flush=True)
    return subprocess.run([sys.executable, *clustered], check=False, cwd=_HERE.parent).returncode or walked


if __name__ == "__main__":
    sys.exit(main())
