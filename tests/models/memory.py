"""How much memory it takes to load a checkpoint, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

MEASURE = """
import sys, threading, time, torch, transformers
from halfbyte.models.quantizer import HalfbyteConfig

def resident():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

model = transformers.AutoModelForCausalLM
options = {"dtype": getattr(torch, sys.argv[3]), "quantization_config": HalfbyteConfig()}
model.from_pretrained(sys.argv[1], **options)  # compiles the kernels
before, peak, done = resident(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
loaded = model.from_pretrained(sys.argv[2], **options)
done = True
watcher.join()
print(peak - before, sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers())))
"""
CAN_MEASURE = Path("/proc/self/status").exists()


def peak_of_loading(path: Path, dtype: str, first: Path) -> tuple[int, int]:
    """Bytes that a model quantized while it loads takes at the peak, and those that it has then. first: a small
    checkpoint that is loaded before, so that kernels are compiled."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once
    command = [sys.executable, "-c", MEASURE, str(first), str(path), dtype]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, held = map(int, run.stdout.split())
    return peak, held
