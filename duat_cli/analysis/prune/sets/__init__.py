"""Sets of terms: how they are chosen and tested, and how a checkpoint without one is written."""
