"""What a baseline holds of what a checkpoint says of itself."""

from __future__ import annotations

from duat_cli.loading.declared.facts import Declared, below


def test_the_file_is_held_where_it_differs_from_the_resolved_config() -> None:
    said = Declared({"n_layer": 2, "rope_theta": 5.0}, {"eos_token_id": 1}, {"n_layer": 2, "rope.theta": 5.0}, "5.23")
    assert said.entries() == {
        "resolved_by": "transformers 5.23",
        "config.n_layer": 2,
        "config.rope.theta": 5.0,
        "file.rope_theta": 5.0,
        "generation.eos_token_id": 1,
    }
    assert below(said.entries(), "config") == {"n_layer": 2, "rope.theta": 5.0}


def test_without_the_load_all_of_the_file_is_held() -> None:
    assert Declared({"n_layer": 2}, {}).entries() == {"file.n_layer": 2}
