"""The spec that `gen-stack init` writes to start from."""

TEMPLATE = """\
# A gen-stack spec: one model on several GPU hosts, one endpoint. Then: gen-stack {file}
# yaml-language-server: $schema=https://raw.githubusercontent.com/gen-stack/gen-stack/main/docs/spec.schema.json
name: qwen-72b
model: Qwen/Qwen2.5-72B-Instruct   # a hub id, or an absolute path that exists on every node

nodes:                             # the order is the rank; the first is the head and has the endpoint
  - {{name: gpu-a, address: 10.0.0.11, gpus: 8}}   # numeric addresses that the nodes reach each other at
  - {{name: gpu-b, address: 10.0.0.12, gpus: 8}}

# Everything below is optional; these are examples, or the defaults.
#
# parallelism:                     # default: tensor parallel inside a node, pipeline parallel across
#   tensor: 8
#   pipeline: 2
# engine:
#   device: cuda                   # cuda, rocm or cpu
#   args: {{max-model-len: 32768}}   # vLLM's own flags by name
#   env: {{NCCL_DEBUG: WARN}}
# api:
#   port: 8000
#   key_file: ./api_key            # default: no key
# network:
#   rdma: auto                     # required: fails without; off
"""
