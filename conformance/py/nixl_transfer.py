"""NIXL over its UCX, two agents in one process: Writes and Reads of registered memory, compared.

Its package imports PyTorch only to know tensors, of which there are none here.
"""
import sys
import types

try:
    import torch  # noqa: F401
except ImportError:
    nothing = types.ModuleType("torch")
    nothing.__getattr__ = lambda name: type(name, (), {})
    sys.modules["torch"] = nothing

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

SIZES = [1, 8, 4096, 65536, 1 << 20, 8 << 20]


def check(good, what):
    print(("ok " if good else "FAIL ") + what, flush=True)


def transfer(agent, what, own, other, name):
    handle = agent.initialize_xfer(what, own, other, name)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    return state == "DONE"


def main():
    config = nixl_agent_config(backends=["UCX"])
    here, there = nixl_agent("here", config), nixl_agent("there", config)
    check("UCX" in here.get_plugin_list(), "there is the plugin of UCX")
    room = max(SIZES)
    ours, theirs = numpy.zeros(room, numpy.uint8), numpy.zeros(room, numpy.uint8)
    here.register_memory([(ours.ctypes.data, room, 0, "")], "DRAM")
    there.register_memory([(theirs.ctypes.data, room, 0, "")], "DRAM")
    name = here.add_remote_agent(there.get_agent_metadata())
    for size in SIZES:
        text = (numpy.arange(size) * 7 + size).astype(numpy.uint8)
        own = here.get_xfer_descs([(ours.ctypes.data, size, 0)], "DRAM")
        other = here.get_xfer_descs([(theirs.ctypes.data, size, 0)], "DRAM")
        ours[:size] = text
        check(transfer(here, "WRITE", own, other, name) and (theirs[:size] == text).all(), f"write of {size}")
        ours[:size] = 0
        check(transfer(here, "READ", own, other, name) and (ours[:size] == text).all(), f"read of {size}")


main()
