"""Every weight that a library has stored, against what the library makes of it, bit for bit."""

from __future__ import annotations

import pytest
from quantised_golden import cases, found_in, same, values

from duat_cli.loading.quantised.find import find
from duat_cli.loading.quantised.formula import UnknownFormatError

CASES = [
    (library, case)
    for library in ("compressed_tensors", "bitsandbytes", "gptqmodel")
    for case in sorted(cases(library))
]


@pytest.mark.parametrize(("library", "case"), CASES)
def test_a_weight_is_what_its_library_makes_of_it(library: str, case: str) -> None:
    held = cases(library)[case]
    found = found_in(held.config, held.stored)
    assert list(found.weights) == ["layer.weight"]
    formula = found.weights["layer.weight"]
    assert formula.shape == tuple(held.expected.shape)
    assert same(values(formula, held.stored), held.expected)
    assert set(formula.parts.values()) | found.beside == set(held.stored)


@pytest.mark.parametrize(("library", "case"), CASES)
def test_a_weight_is_the_same_read_in_pieces(library: str, case: str) -> None:
    held = cases(library)[case]
    formula = found_in(held.config, held.stored).weights["layer.weight"]
    whole = values(formula, held.stored)
    assert same(values(formula, held.stored, at_once=formula.step), whole)
    assert formula.step <= 32


@pytest.mark.parametrize(
    ("library", "case", "words"),
    [
        ("compressed_tensors", "int4", "compressed-tensors pack-quantized (int4, groups of 32)"),
        ("compressed_tensors", "fp8 in blocks", "compressed-tensors float-quantized (float8, blocks of 16 x 64)"),
        ("bitsandbytes", "nf4 doubly", "bitsandbytes (nf4, blocks of 64, doubly quantised)"),
        ("bitsandbytes", "int8", "bitsandbytes (int8, a scale for each row)"),
        ("gptqmodel", "gptq 4", "gptq (4 bits, groups of 32)"),
        ("gptqmodel", "awq", "awq (4 bits, groups of 32)"),
    ],
)
def test_the_words_for_a_format(library: str, case: str, words: str) -> None:
    held = cases(library)[case]
    assert found_in(held.config, held.stored).format == words


def test_a_method_that_is_not_read() -> None:
    with pytest.raises(UnknownFormatError, match="quant_method 'hqq'"):
        find("hqq", {}, {}, lambda name: b"")
