"""Which process this is, by what launchers set."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duat_cli.analysis.shards.ranks import Ranks, each_alone, owners
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


def test_prompts_are_shared_evenly_and_by_their_hashes() -> None:
    drawn = random.Random(0)
    keys = [drawn.getrandbits(64) for _ in range(100)]
    for world in (1, 3, 7):
        owner = owners(array("Q", keys), each_alone(100), world)
        counts = [owner.count(rank) for rank in range(world)]
        assert max(counts) - min(counts) <= 1
        assert owner[0] == 0  # which runs it as soon as it begins
        another = drawn.sample(keys, 100)  # the shares are the same in any order, but for whose they are
        other = dict(zip(another, owners(array("Q", another), each_alone(100), world), strict=True))
        assert {(mine - other[key]) % world for key, mine in zip(keys, owner, strict=True)} == {-other[keys[0]] % world}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_batch_has_one_owner_and_batches_are_shared_evenly(
    groups: list[int], world: int, drawn: random.Random
) -> None:
    keys = array("Q", (drawn.getrandbits(64) for _ in groups))
    leaders = array("I", (groups.index(group) for group in groups))
    owner = owners(keys, leaders, world)
    assert owner[0] == 0
    assert all(owner[k] == owner[leader] for k, leader in enumerate(leaders))
    counts = [[owner[leader] for leader in set(leaders)].count(rank) for rank in range(world)]
    assert max(counts) - min(counts) <= 1
