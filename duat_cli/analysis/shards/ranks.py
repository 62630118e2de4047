"""Which of several processes this one is, from the environment that the launcher sets.

torchrun and accelerate launch set RANK and WORLD_SIZE, mpirun (which accelerate launch takes on CPUs) its own names,
Slurm's srun SLURM_PROCID and SLURM_NTASKS. accelerate's PartialState would read the same and also connect the
processes, which have nothing to say to each other here.
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
    """How many there are."""
    local: int = 0
    """Among those of this machine."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """One alone where no launcher says otherwise."""
        for rank, world, local in VARIABLES:
            if rank.startswith("SLURM") and "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
                continue  # the batch script itself: the tasks are those that srun will start
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
        """Whether it is the one that talks."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def owners(keys: array[int], leaders: array[int], world: int) -> array[int]:
    """By position: which of so many runs the prompt. In the order of their hashes, prompts fall to the processes in
    turn, so that each has as many as the others; the set's first one falls to the first. Those of a batch go with its
    first.

    leaders: by position, the first prompt of its batch.
    """
    own = np.frombuffer(leaders, dtype=np.uint32)
    first = np.flatnonzero(own == np.arange(len(own)))  # of every batch
    owner = np.empty(len(own), dtype=np.uint32)
    order = first[np.argsort(np.frombuffer(keys, dtype=np.uint64)[first], kind="stable")]
    owner[order] = (np.arange(len(order)) - np.flatnonzero(order == 0)) % world
    return array("I", owner[own].tobytes())


def each_alone(count: int) -> array[int]:
    """The leaders of so many prompts that run one by one."""
    return array("I", np.arange(count, dtype=np.uint32).tobytes())
