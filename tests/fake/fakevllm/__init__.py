"""A fake engine: vLLM's command line, processes, ports, answers and ways to die, without a model, ready in a second.

It is held to the real one by tests/fake/test_conformance.py. Standard library only, so that it runs in any image:

    head        vllm serve            the API server
                └ VLLM::EngineCore    the scheduler: every token is one step through all ranks
                  └ VLLM::Worker_TP0  rank 0; its store listens on *:MASTER_PORT
    headless    vllm serve            waits for its child and for nothing else
                └ VLLM::Worker_TPk    rank k; never notices the head's death

One rank a node. Variables (all optional) and run-time switches are in `switches`.
"""
