"""Small models: a byte-level Llama that has learned to continue the licence, and untrained ones of many families."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb

transformers = pytest.importorskip("transformers")

TEXT = Path(__file__).parents[2] / "LICENSE"  # a text that stays as it is
LENGTH = 48
LLAMA = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def text() -> Tensor:
    """The licence, a byte a token."""
    return torch.tensor(list(TEXT.read_bytes()))


@pytest.fixture(scope="session")
def llama(text: Tensor) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(100):
        batch = text[torch.randint(len(text) - LENGTH, (16, 1)) + torch.arange(LENGTH)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def accelerated(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same in bitsandbytes' NF4 and bf16, computed by halfbyte.

    It is restored behind its module: other tests see that nothing of halfbyte is left in transformers.
    """
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("accelerated")
    llama.save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).eval()
    with pytest.MonkeyPatch.context() as patch:  # on any CPU, though bitsandbytes may be the faster one there
        patch.setattr("halfbyte.models.bitsandbytes.is_faster", lambda facts: False)
        assert hb.accelerate(model).modules
    yield model
    hb.restore(model)


@pytest.fixture(scope="session")
def prompt(text: Tensor) -> Tensor:
    return text[1000:1012]


@pytest.fixture(scope="session")
def states_of() -> Callable[[Any, Tensor], tuple[Tensor, ...]]:
    """The hidden states [T, D] of every layer, as transformers gives them."""

    def states_of(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = model(tokens[None].to(model.device), output_hidden_states=True).hidden_states
        return tuple(state[0] for state in found)

    return states_of
