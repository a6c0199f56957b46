"""What scripts/bench_decode.py measures, each way to decode in a process of its own.

`worker` is the protocol; `ours`, `huggingface`, `genai` and `llama` are started by it, each by the Python that has its
packages. The last three import nothing of this project: peers live in environments of their own.
"""
