"""The rank of this process among several, from the environment that the launcher sets.

torchrun and accelerate launch set RANK and WORLD_SIZE, mpirun (which accelerate launch uses on CPUs) names of its own,
Slurm's srun SLURM_PROCID and SLURM_NTASKS. accelerate's PartialState would read the same, but also connect the
processes, which do not communicate here.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from duat_cli.errors import InputError

VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the work."""

    rank: int = 0
    world: int = 1
    """How many processes there are."""
    local: int = 0
    """Rank among the processes of this machine."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """The rank that the environment gives; a single process without a launcher."""
        for rank, world, local in VARIABLES:
            if rank.startswith("SLURM") and "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
                continue  # the batch script itself; its tasks are the processes that srun will start
            if rank in environment and world in environment:
                return cls._checked({name: environment[name] for name in (rank, world, local) if name in environment})
        return cls()

    @classmethod
    def _checked(cls, given: dict[str, str]) -> Ranks:
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        try:
            found = cls(*(int(value) for value in given.values()))
        except ValueError:
            raise InputError(f"{said}: expected whole numbers") from None
        if not 0 <= found.rank < found.world:
            expected = f"a rank of 0 to {found.world - 1}" if found.world > 0 else "at least one process"
            raise InputError(f"{said}: expected {expected}")
        return found

    @property
    def first(self) -> bool:
        """Whether this is the process that shows messages and the report."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def owners(keys: array[int], leaders: array[int], world: int) -> array[int]:
    """The rank, of `world` ranks, that runs each prompt, by position. Batches go to the ranks in turn, in the order of
    the hashes of their first prompts, so that each gets equally many; the batch of the set's first prompt goes to rank
    0.

    leaders: by position, the first prompt of each one's batch.
    """
    own = np.frombuffer(leaders, dtype=np.uint32)
    first = np.flatnonzero(own == np.arange(len(own)))  # first prompt of every batch
    owner = np.empty(len(own), dtype=np.uint32)
    order = first[np.argsort(np.frombuffer(keys, dtype=np.uint64)[first], kind="stable")]
    owner[order] = (np.arange(len(order)) - np.flatnonzero(order == 0)) % world
    return array("I", owner[own].tobytes())


def each_alone(count: int) -> array[int]:
    """The leaders of so many prompts that run one by one."""
    return array("I", np.arange(count, dtype=np.uint32).tobytes())
