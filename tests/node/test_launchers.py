from __future__ import annotations

import pytest

from stack_node import config, launchers
from stack_node.launchers import LAUNCHERS, assign, hosts

# As torch 2.13's agent sets them for the worker on the second of three nodes (c10d rendezvous).
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "qwen-72b",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "MASTER_ADDR": "lab1",
    "MASTER_PORT": "41235",
}
SLURM = {
    "GEN_STACK_LAUNCHER": "slurm",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "lab[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
SKYPILOT = {
    "GEN_STACK_LAUNCHER": "skypilot",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NODE_IPS": "10.0.0.11\n10.0.0.12\n10.0.0.13",
}
LEADER_WORKER_SET = {
    "GEN_STACK_LAUNCHER": "leaderworkerset",
    "LWS_WORKER_INDEX": "1",
    "LWS_GROUP_SIZE": "3",
    "LWS_LEADER_ADDRESS": "qwen-0.qwen.default",
}
STATEFUL_SET = {
    "GEN_STACK_LAUNCHER": "statefulset",
    "HOSTNAME": "qwen-1",
    "NNODES": "3",
    "MASTER_ADDR": "qwen-0.qwen-nodes",
}
EVERY = {
    "torchrun": (TORCHRUN, "lab1"),
    "slurm": (SLURM, "lab1"),
    "skypilot": (SKYPILOT, "10.0.0.11"),
    "leaderworkerset": (LEADER_WORKER_SET, "qwen-0.qwen.default"),
    "statefulset": (STATEFUL_SET, "qwen-0.qwen-nodes"),
}


def problems(environ: dict[str, str], **changed: str) -> list[str]:
    return assign({**environ, **changed})[1]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_gives_the_same_node(name: str) -> None:
    environ, head = EVERY[name]
    assigned, wrong = assign(environ)
    assert wrong == []
    explicit = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": head}
    assert config.read(assigned) == config.read(explicit)


def test_nothing_is_guessed_from_variables_that_happen_to_be_there() -> None:
    for name, (environ, _) in EVERY.items():
        stray = {key: value for key, value in environ.items() if key.startswith(("SLURM_", "LWS_", "SKYPILOT_"))}
        assert assign({**stray, "HOSTNAME": "qwen-1"}) == ({**stray, "HOSTNAME": "qwen-1"}, []), name
    assert not config.read(assign({"HOSTNAME": "qwen-0", "KUBERNETES_SERVICE_HOST": "10.96.0.1"})[0])[0].in_group


def test_torchrun_inside_a_slurm_job_needs_no_name() -> None:
    slurm = {key: value for key, value in SLURM.items() if key != launchers.VARIABLE}
    assigned, wrong = assign({**slurm, **TORCHRUN})
    assert (wrong, assigned["MASTER_ADDR"]) == ([], "lab1")


def test_the_named_launcher_counts_where_torchrun_left_its_variables() -> None:
    assert assign({**TORCHRUN, **SLURM, "SLURM_NODEID": "2"})[0]["NODE_RANK"] == "2"


def test_torchruns_own_store_and_variables_are_kept_from_the_engine() -> None:
    assigned, _ = assign({**TORCHRUN, "OMP_NUM_THREADS": "1"})
    assert assigned == {
        "OMP_NUM_THREADS": "1",
        "NNODES": "3",
        "NODE_RANK": "1",
        "MASTER_ADDR": "lab1",
    }
    assert assign({**TORCHRUN, "GEN_STACK_MASTER_PORT": "30500"})[0]["MASTER_PORT"] == "30500"


def test_the_groups_own_variables_win() -> None:
    assigned, wrong = assign({**SLURM, "MASTER_ADDR": "10.0.0.11", "NNODES": "3"})
    assert (wrong, assigned["MASTER_ADDR"]) == ([], "10.0.0.11")


def test_contradictions_name_both() -> None:
    assert problems(SLURM, NNODES="2") == ["NNODES=2 contradicts SLURM_STEP_NUM_NODES=3 of slurm; unset NNODES"]
    assert problems(SLURM, NODE_RANK="0") == ["NODE_RANK=0 contradicts SLURM_NODEID=1 of slurm; unset NODE_RANK"]
    assert problems(SLURM, SLURM_NODEID="3") == [
        "SLURM_NODEID=3 is not below SLURM_STEP_NUM_NODES=3: ranks count from 0; correct one"
    ]
    assert problems(STATEFUL_SET, HOSTNAME="qwen-3") == [
        "HOSTNAME=3 is not below NNODES=3: ranks count from 0; correct one"
    ]


def test_what_a_launcher_should_have_set_is_missed_by_name() -> None:
    assert problems({"GEN_STACK_LAUNCHER": "leaderworkerset", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}) == [
        "LWS_LEADER_ADDRESS is not set: leaderworkerset sets it; set MASTER_ADDR, or start by leaderworkerset"
    ]


def test_one_stack_node_runs_all_gpus_of_its_node() -> None:
    rule = "is not one process a node, and one stack-node runs all GPUs of its node"
    assert problems(TORCHRUN, LOCAL_WORLD_SIZE="8") == [f"LOCAL_WORLD_SIZE='8' of torchrun: {rule}"]
    assert problems(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x3)") == [f"SLURM_STEP_TASKS_PER_NODE='2(x3)' of slurm: {rule}"]
    assert problems(SLURM, SLURM_STEP_TASKS_PER_NODE="1") == []


def test_an_unknown_launcher() -> None:
    assert problems({"GEN_STACK_LAUNCHER": "pbs"}) == [
        "GEN_STACK_LAUNCHER='pbs': is no launcher; use one of torchrun, slurm, leaderworkerset, statefulset, skypilot"
    ]


def test_with_problems_there_is_no_group_to_judge() -> None:
    assigned, wrong = assign({**STATEFUL_SET, "HOSTNAME": "qwen"})
    assert wrong == ["HOSTNAME='qwen' of statefulset: does not end with a pod's ordinal, as NAME-0 does"]
    assert config.read(assigned) == config.read({})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-a", ["gpu-a"]),
        ("gpu-a,gpu-b", ["gpu-a", "gpu-b"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("gpu[008-010],login", ["gpu008", "gpu009", "gpu010", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1,3].cluster", ["n1.cluster", "n3.cluster"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert hosts(text) == names


@pytest.mark.parametrize("text", ["", "node[1-", "node[a]", "node1]"])
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        hosts(text)
