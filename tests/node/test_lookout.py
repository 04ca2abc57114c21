"""Which processes are watched, and how often new ones are looked for."""

from __future__ import annotations

import pytest

from stack_node import lookout


@pytest.mark.parametrize(
    ("title", "parent", "counts", "name"),
    [
        ("VLLM::EngineCore", "vllm serve m", True, "VLLM::EngineCore"),
        ("VLLM::Worker_TP1     ", "VLLM::EngineCore", False, "VLLM::Worker_TP1"),
        ("mine::EngineCore_DP0", "vllm serve m", True, "mine::EngineCore_DP0"),
        ("VLLM::EngineCore", "VLLM::EngineCore", True, None),
        ("py -c from multiprocessing.spawn import spawn_main; spawn_main(3)", "v", True, "a multiprocessing child"),
        ("py -c from multiprocessing.spawn import spawn_main; spawn_main(3)", "peer access test", False, None),
        ("py -c from multiprocessing.forkserver import main; main(4)", "v", True, "a multiprocessing child"),
        ("py -c from multiprocessing.resource_tracker import main;main(4)", "v", True, None),
        ("nvcc x.cu", "VLLM::Worker_TP1", True, None),
        ("", "vllm", True, None),
    ],
)
def test_whose_end_is_the_engines_end(title: str, parent: str, counts: bool, name: str | None) -> None:
    assert lookout.long_lived(title, parent, counts) == name


def test_a_young_tree_is_looked_at_often_and_a_large_proc_more_rarely() -> None:
    assert [lookout.interval(age, 0.0) for age in (0, 0.5, 5, 60, 599, 601)] == [0.1, 0.1, 0.5, 1.0, 1.0, 5.0]
    assert lookout.interval(0, 0.02) == pytest.approx(2.0)
    assert lookout.interval(3600, 0.02) == pytest.approx(8.0)
