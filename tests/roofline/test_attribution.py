"""Every microsecond in one class: marked steps, graphs that have no marks, fused kernels, operators of a CPU."""

import pytest
from synthetic import trace

from halfbyte.roofline.align import align
from halfbyte.roofline.attribution import attribute_cpu, attribute_gpu, labels_by_launch, made_dense
from halfbyte.roofline.events import Span, Trace
from halfbyte.roofline.names import (
    ATTENTION,
    COPIES,
    DEQUANTIZE,
    ELEMENTWISE,
    GAPS,
    NORMS,
    OTHER,
    SAMPLING,
    UNNAMED,
    Label,
    base,
    by_name,
    classify,
)

Q, K, V, GATE = (Label("products", role) for role in ("q", "k", "v", "gate"))
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
COPY = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (ADD, ELEMENTWISE), (COPY, COPIES), (FLASH, ATTENTION), ("Memcpy DtoD (Device -> Device)", COPIES),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", UNNAMED), ("void gemm_4bit_simt<__nv_bfloat16, 1>(int)", UNNAMED),
        ("decode", UNNAMED), ("multiply", UNNAMED), ("lay_out", UNNAMED),
        ("attend_kernel", ATTENTION), ("attend_parts_kernel", ATTENTION), ("append_kernel", COPIES),
        ("argmax_kernel", SAMPLING), ("put_argmax_kernel", SAMPLING), ("step_masks_kernel", ELEMENTWISE),
        ("angles_kernel", ELEMENTWISE),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)", DEQUANTIZE),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", NORMS),
        ("triton_poi_fused__to_copy_mul_silu_1", ELEMENTWISE),
        ("aten::addmm", UNNAMED), ("aten::add", ELEMENTWISE), ("mystery", OTHER),
    ],
)  # fmt: skip
def test_names(name: str, label: Label) -> None:
    assert by_name(name) == label


def test_modules_decide_before_names() -> None:
    assert classify("mystery", Q) == Q
    assert classify(ADD, NORMS) == NORMS
    assert classify("void kDequantizeBlockwise<float>(float*)", Q) == Label("dequantize", "q")
    assert classify("cutlass_gemm", ATTENTION) == ATTENTION  # scores are products, but not of weights
    assert classify(ADD, ATTENTION) == ELEMENTWISE
    assert classify(COPY, ATTENTION) == COPIES
    assert classify("mystery", ATTENTION) == OTHER


def test_bare_names() -> None:
    assert base(ADD) == "vectorized_elementwise_kernel"
    assert base("void (anonymous namespace)::softmax_warp_forward<float>(float*)") == "softmax_warp_forward"


STEP = [
    ("norms|", "reduce", NORMS), ("products|q", "gemm", Q), ("products|k", "gemm", K), ("products|v", "gemm", V),
    ("attention|", FLASH, ATTENTION), ("", ADD, ELEMENTWISE), ("products|gate", "gemm", GATE), ("", "mystery", OTHER),
]  # fmt: skip


def step_trace(steps: int = 1, marked: bool = True, gap: float = 1.0) -> Trace:
    """Kernels of 10 µs with `gap` between them, each launched 100 µs before it starts, between two waits."""
    launches = []
    now = 1000.0
    for _ in range(steps):
        for where, name, _ in STEP:
            launches.append((where if marked else "", name, now - 100, now, 10.0))
            now += 10 + gap
    return trace(*launches, waits=[(0, 900), (950, now + 20)])


def test_marked_steps() -> None:
    assert labels_by_launch(step_trace()) == [(name, label) for _, name, label in STEP]


def test_steps_without_marks_take_their_labels_from_a_marked_one() -> None:
    profile = attribute_gpu(step_trace(4, marked=False), labels_by_launch(step_trace()), 4)
    for label in (Q, K, V, GATE, ATTENTION, NORMS, ELEMENTWISE):
        assert profile.classes[label] == pytest.approx((10, 1))
    assert profile.names[OTHER]["mystery"] == pytest.approx((10, 1))
    # From the wait before the first kernel to the wait after the last.
    assert profile.total == pytest.approx((1000 + 4 * 8 * 11 + 20 - 900) / 4)
    assert sum(us for us, _ in profile.classes.values()) == pytest.approx(profile.total)
    assert profile.classes[GAPS][0] == pytest.approx(profile.total - 80)
    assert [piece.start for piece in profile.timeline] == pytest.approx([11 * place for place in range(8)])


def test_without_kernels_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="recorded no kernel"):
        attribute_gpu(Trace(), [], 1)


def test_fused_kernels_keep_the_roles_of_products() -> None:
    """Three layers, in which fusing leaves one kernel of three before each pair of equal products."""
    known = [
        ("mul", NORMS),
        ("mean", NORMS),
        ("add", NORMS),
        ("gemm", Q),
        ("gemm", K),
        ("mul", ELEMENTWISE),
        ("gemm", GATE),
    ] * 3
    fused = ["triton_red_fused_add_mean_rsqrt_0", "gemm", "gemm", "triton_poi_fused_silu_mul_1", "gemm"] * 3
    assert align(known, [*fused, "Memcpy DtoD"]) == [NORMS, Q, K, ELEMENTWISE, GATE] * 3 + [COPIES]


def test_a_product_by_another_kernel_is_still_that_product() -> None:
    known = [("mul", NORMS), ("gemm_a", Q), ("gemm_a", K), ("mul", ELEMENTWISE), ("gemm_b", GATE)]
    assert align(known, ["mul", "gemm_a", "nvjet", "mul", "gemm_b"]) == [NORMS, Q, K, ELEMENTWISE, GATE]


def test_a_kernel_that_nobody_knows_is_other() -> None:
    assert align([("gemm", Q)], ["mystery", "gemm"]) == [OTHER, Q]


def test_alignment_of_a_large_step() -> None:
    layer = [("mul", NORMS), *((f"gemm{role}", Label("products", role)) for role in "qkvo"), ("mul", ELEMENTWISE)] * 8
    known = layer * 20
    names = [name for name, label in known if label != NORMS]
    assert align(known, names).count(ELEMENTWISE) >= 159
    assert [label for label in align(known, names) if label.group == "products"] == [
        label for _, label in known if label.group == "products"
    ]


def test_operators_of_a_cpu() -> None:
    spans = (Span("step", 0, 100), Span("products|q", 10, 40), Span("attention|", 50, 70))
    operators = (
        Span("aten::linear", 15, 35), Span("aten::mm", 20, 30), Span("aten::view", 42, 44),
        Span("aten::mul", 52, 56), Span("aten::scaled_dot_product_attention", 60, 68), Span("odd::op", 80, 85),
    )  # fmt: skip
    profile = attribute_cpu(Trace(ranges=spans, operators=operators), 1)
    us = {label: found for label, (found, _) in profile.classes.items()}
    assert us == {Q: 30, ELEMENTWISE: 4, ATTENTION: 8, OTHER: 5, GAPS: pytest.approx(53)}
    assert profile.classes[Q][1] == 1  # one call of the module
    assert profile.total == 100
    assert profile.names[Q]["outside torch"][0] == pytest.approx(10)


def test_the_timeline_of_a_cpu_is_a_whole_step() -> None:
    """Also where something else, such as a collection of garbage, held the first one up."""
    late = (Span("aten::add", 700, 710), Span("aten::mul", 720, 730))
    steps = [Span(span.name, span.start + at, span.end + at) for at in (0, 50, 100) for span in late]
    profile = attribute_cpu(Trace(ranges=(Span("step", 0, 850),), operators=tuple(steps)), 3)
    assert [(piece.name, piece.start) for piece in profile.timeline] == [("aten::add", 0), ("aten::mul", 20)]


def test_what_was_made_dense() -> None:
    def profile(*kernels: str) -> dict[str, bool]:
        launches = [("products|q", name, 10 + place, 20 + 2 * place, 1.0) for place, name in enumerate(kernels)]
        found = trace(*launches)
        return made_dense(attribute_gpu(found, labels_by_launch(found), 1))

    assert profile("kDequantizeBlockwise", "nvjet") == {"q": True}
    assert profile("kDequantizeBlockwise", "gemm_4bit_sm80") == {"q": False}  # only its scales
    assert profile("decode") == {"q": False}
