"""The pages that several benchmarks write to."""

from __future__ import annotations

from paired import write_section


def test_a_section_is_replaced_and_the_others_stay(tmp_path):
    path = tmp_path / "benchmarks.md"
    write_section(path, "one", "first")
    write_section(path, "two", "second")
    write_section(path, "one", "anew")
    text = path.read_text()
    assert text.startswith("# Benchmarks of persistence")
    assert "first" not in text
    assert text.index("anew") < text.index("second")
    write_section(path, "two", "second")
    assert path.read_text() == text
