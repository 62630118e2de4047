"""Which process this is, by what launchers set."""

from __future__ import annotations

import pytest

from duat_cli.analysis.shards.ranks import Ranks
from duat_cli.errors import InputError

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Ranks(0, 1, 0)),
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, Ranks(2, 3, 1)),
        ({"RANK": "2", "WORLD_SIZE": "3"}, Ranks(2, 3, 0)),
        ({"WORLD_SIZE": "3"}, Ranks(0, 1, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Ranks(1, 2, 0)),
        (SLURM, Ranks(3, 8, 1)),
        ({**SLURM, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, Ranks(3, 8, 1)),
        ({**SLURM, "SLURM_JOB_ID": "7"}, Ranks(0, 1, 0)),  # the batch script, not a task of srun
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}, Ranks(0, 2, 0)),
    ],
)
def test_a_launcher_says_it(environment: dict[str, str], expected: Ranks) -> None:
    assert Ranks.of(environment) == expected


@pytest.mark.parametrize(("rank", "world"), [("3", "3"), ("-1", "2"), ("0", "0"), ("one", "2")])
def test_nonsense_is_refused(rank: str, world: str) -> None:
    with pytest.raises(InputError, match=f"RANK={rank}, WORLD_SIZE={world}: expected"):
        Ranks.of({"RANK": rank, "WORLD_SIZE": world})


def test_every_key_has_one_owner() -> None:
    for key in (0, 5, 2**64 - 1):
        assert sum(Ranks(rank, 3).has(key) for rank in range(3)) == 1
