"""What a process keeps lies in no pool of the caller's, whose memory may be lost: vLLM's, while it sleeps, for one.

In a process of its own, which has no constants yet.
"""

import subprocess
import sys

SCRIPT = """
import torch
import halfbyte as hb
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import codebook_tensor, exponents_tensor, midpoints_tensor
from halfbyte.kernels.quantize.reference import dynamic_table
from halfbyte.kernels.quantize.triton import cells

device = torch.device("cuda", torch.cuda.device_count() - 1)
torch.cuda.set_device(device)
torch.empty(1, device=device)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    q = hb.quantize(torch.randn(512, 512, device=device), "nf4", nested=True)
    dense = hb.dequantize(q)
    exponents = exponents_tensor(device)
    midpoints, table = midpoints_tensor(NF4, device), dynamic_table(device)
spans = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]

def is_in_pool(tensor):
    return any(first <= tensor.data_ptr() < last for first, last in spans)

for function in (codebook_tensor, cells, dynamic_code):
    assert function.cache_info().currsize, function.__name__
kept = [codebook_tensor(NF4, device), *cells(NF4, device)[:2], dynamic_code(device), exponents, midpoints, table]
assert all(tensor.device == device for tensor in kept)
assert not any(map(is_in_pool, kept)), list(map(is_in_pool, kept))
assert is_in_pool(q.packed) and is_in_pool(dense)
"""


def test_constants_are_in_no_pool() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=250, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
