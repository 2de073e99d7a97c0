"""A small language model, trained here in seconds, saved, and loaded in 4 bits by transformers and bitsandbytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.models import transformers as host
from halfbyte.models.accelerate import _accelerated as accelerated_models

from . import families

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

TEXT = Path(__file__).parents[2] / "LICENSE"  # a text that stays as it is
LENGTH = 48


@pytest.fixture
def no_other_model() -> Iterator[None]:
    """No model that another test has accelerated, and that still lives, keeps libraries patched meanwhile; nor does a
    test that took one into captured steps by itself."""
    others = list(accelerated_models)
    for model in others:
        hb.restore(model)
    host.undo_in_library()
    yield
    for model in others:
        hb.accelerate(model)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small operators on several threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def captures() -> Iterator[None]:
    """Steps can be captured; what a test has changed in libraries for that is undone."""
    with families.captures():
        yield
        host.undo_in_library()


@pytest.fixture(scope="session")
def text() -> torch.Tensor:
    """The licence, a byte a token."""
    return torch.tensor(list(TEXT.read_bytes()))


@pytest.fixture(scope="session")
def checkpoint(text: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level Llama that has learned to continue the licence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(150):
        starts = torch.randint(len(text) - LENGTH, (16, 1))
        batch = text[starts + torch.arange(LENGTH)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("trained")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompts(text: torch.Tensor) -> torch.Tensor:
    """64 pieces of it, 24 tokens each."""
    return text[(torch.arange(64) * ((len(text) - 24) // 64))[:, None] + torch.arange(24)]


@pytest.fixture
def load(checkpoint: Path) -> Iterator[Any]:
    """Loads the checkpoint in 4 bits, as users do; keywords are BitsAndBytesConfig's. Afterwards all is restored."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    loaded = []

    def load(path: Path = checkpoint, **options: Any) -> Any:
        settings = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
        config = BitsAndBytesConfig(load_in_4bit=True, **settings | options)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=config, dtype=torch.bfloat16, device_map={"": device}
        )
        loaded.append(model.eval())
        return model

    yield load
    for model in loaded:
        hb.restore(model)
