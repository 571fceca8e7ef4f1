"""The graph is the model, or there is no proof; in-place code means what it does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.graph import agreement
from holdfast.bounding.graph.agreement import check_agreement, random_points
from holdfast.bounding.graph.once import trace_once
from holdfast.bounding.graph.trace import trace
from holdfast.errors import InputError, UnsupportedError
from lookalikes import RESIDUAL, settled
from lookalikes import X as IMAGES

PROOFS = [m.name for m in hf.methods("certify") if m.guarantee == "proof" and not m.smoothed]


class Dense(nn.Module):
    """A dense layer with given weights, for models that differ in what they do around it."""

    def __init__(self, weight, bias):
        super().__init__()
        self.fc = nn.Linear(len(weight[0]), 2)
        self.fc.weight.data, self.fc.bias.data = torch.tensor(weight), torch.tensor(bias)
        self.eval()

    def forward(self, x):
        return self.fc(x)


class ReadsData(Dense):
    def forward(self, x):
        return self.fc(x) + torch.tensor([1.0, 0.0]) * (x.data.mean() - 0.5)


class UsesBatchSize(Dense):
    def forward(self, x):
        return self.fc(x * x.shape[0])


class UsesSize(Dense):
    def forward(self, x):
        return self.fc(x + 0.1 * x.size(0))


class CountsTheBatch(Dense):
    """No arithmetic on the batch size itself: only the comparison at batch size one can tell."""

    def forward(self, x):
        return self.fc(x * torch.ones(x.shape[0]).sum())


class CountsCalls(Dense):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) * (1.0 if self.calls < 1000 else -1.0)


class WritesBuffer(Dense):
    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen.add_(1)
        return self.fc(x)


class LeavesDropoutOn(Dense):
    def forward(self, x):
        return self.fc(F.dropout(x, 0.5))


class DrawsNoise(Dense):
    def forward(self, x):
        return self.fc(x + torch.rand(1))


class WritesIntoInput(Dense):
    def forward(self, x):
        return self.fc(x.add_(-0.5))


class WritesIntoAView(Dense):
    def forward(self, x):
        return self.fc(x.view(-1, 1).sub_(0.5))


class UsesAStaleView(Dense):
    def forward(self, x):
        h = x - 0.5
        flat = h.flatten(1)
        F.relu(h, inplace=True)
        return self.fc(flat)


class UsesTheWholeOfASlice(Dense):
    """The slice is a view: what is done to it is done to h."""

    def forward(self, x):
        h = x - 0.5
        F.relu(h[:, :1], inplace=True)
        return self.fc(h)


ONE = ([[1.0], [0.0]], [0.0, 0.2])
REFUSED = {
    "reads data": (ReadsData([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]), "attribute 'data'"),
    "batch size": (UsesBatchSize(*ONE), "batch size"),
    "size": (UsesSize(*ONE), "batch size"),
    "counted batch": (CountsTheBatch(*ONE), "batch size one"),
    "calls": (CountsCalls(*ONE), "'calls'"),
    "buffer": (WritesBuffer(*ONE), "'seen'"),
    "dropout": (LeavesDropoutOn(*ONE), "left on"),
    "noise": (DrawsNoise(*ONE), "does not reproduce"),
    "slice": (UsesTheWholeOfASlice(*ONE), "changed in place"),
    "stale view": (UsesAStaleView(*ONE), "changed in place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tracing_cannot_see_is_refused_by_name(case):
    model, message = REFUSED[case]
    x = torch.full((2, model.fc.in_features), 0.6)
    for method in ("ibp", "crown"):
        with pytest.raises(UnsupportedError, match=message):
            hf.certify(model, x, torch.zeros(2, dtype=torch.long), hf.Linf(0.1), method)


@pytest.mark.parametrize("model", [WritesIntoInput(*ONE), WritesIntoAView(*ONE)])
def test_a_model_that_writes_into_its_input_is_refused_and_the_input_stays(model):
    x = torch.full((2, 1), 0.6)
    for call in (
        lambda: hf.certify(model, x, torch.zeros(2, dtype=torch.long), hf.Linf(0.1)),
        lambda: hf.attack(model, x, torch.zeros(2, dtype=torch.long), hf.Linf(0.1), "pgd"),
        lambda: hf.bounds(model, x, hf.Linf(0.1), "ibp"),
        lambda: hf.radius(model, x, torch.zeros(2, dtype=torch.long), "linf"),
        lambda: hf.explain(model, x, torch.zeros(2, dtype=torch.long), "saliency"),
    ):
        with pytest.raises(InputError, match="writes into its input"):
            call()
        assert torch.equal(x, torch.full((2, 1), 0.6))
    with pytest.raises(UnsupportedError, match="writes into its input"):
        trace(model, x)


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("method", PROOFS)
def test_no_certificate_ignores_a_hook(method, pre):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    entry = next(m for m in hf.methods("certify") if m.name == method)
    x, shape = torch.rand(3, 2), (3, 2)
    if "linf" not in entry.threats and "l2" not in entry.threats:
        model.insert(0, nn.Flatten()).eval()
        x = torch.rand(3, 1, 1, 2)
        shape = (3, 1, 1, 2)
    if method == "centroid":
        pytest.skip("has networks of its own, below")
    threat = {"linf": hf.Linf(0.1), "l2": hf.L2(0.1), "patch": hf.Patch(1, 1), "sparse": hf.Sparse(1)}[
        next(name for name in ("linf", "l2", "patch", "sparse") if name in entry.threats)
    ]
    y = model(x).argmax(1)
    hf.certify(model, x, y, threat, method)  # constants may be kept from here on
    last = model[-1]
    handle = (
        last.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 1.0,))
        if pre
        else last.register_forward_hook(lambda m, inputs, output: torch.where(inputs[0].sum() > 9, -output, output))
    )
    assert x.shape == shape
    with pytest.raises(UnsupportedError, match=r"forward hook"):
        hf.certify(model, x, y, threat, method)
    handle.remove()
    hf.certify(model, x, y, threat, method)


def test_a_hook_under_a_centroid_network_is_refused():
    from holdfast.models import Centroid, CentroidNet

    model = CentroidNet(nn.Sequential(nn.Linear(2, 3)), Centroid(2, 3)).eval()
    x = torch.rand(2, 2)
    y = model(x).argmax(1)
    hf.certify(model, x, y, hf.L2(0.01), "centroid")
    model.body[0].register_forward_hook(lambda m, i, o: o * 2)
    with pytest.raises(UnsupportedError, match="forward hook"):
        hf.certify(model, x, y, hf.L2(0.01), "centroid")


def test_a_global_hook_is_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: None)
    try:
        with pytest.raises(UnsupportedError, match="all modules"):
            trace(nn.Linear(2, 2).eval(), torch.rand(1, 2))
    finally:
        handle.remove()


def test_a_replaced_forward_is_refused():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    model[0].forward = lambda x: x * 2
    with pytest.raises(UnsupportedError, match="layer '0'"):
        trace(model, torch.rand(1, 2))


def test_pruned_and_normalised_layers_are_traced_with_their_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    x = torch.rand(5, 3)
    assert torch.allclose(trace(model, x, hf.Linf(0.1)).forward(x), model(x), atol=1e-6)


class SkipInPlace(nn.Module):
    """A block with a skip whose in-place ReLU changes the skipped value too: ordinary code, easily misread."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.a(x)
        out = self.b(self.relu(h))
        out += h
        out = self.relu(out)
        return self.c(out)


class SkipCat(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(6, 3)

    def forward(self, x):
        h = x - 0.5
        F.relu(h, inplace=True)
        h.mul_(2.0)
        h -= 0.1
        return self.c(torch.cat([h, x], 1))


@pytest.mark.parametrize("make", [SkipInPlace, SkipCat])
@pytest.mark.parametrize("method", [m.name for m in hf.methods("bounds") if m.name != "cap"])
def test_in_place_operations_mean_what_they_do(make, method):
    torch.manual_seed(0)
    model = make().eval()
    x, threat = torch.rand(6, 3), hf.Linf(0.2)
    graph = trace(model, x, threat)
    assert torch.allclose(graph.forward(x), model(x.clone()), atol=1e-6)
    found = hf.bounds(model, x, threat, method)
    for _ in range(200):
        logits = model(threat.project(x + 0.4 * (torch.rand_like(x) - 0.5), x))
        assert bool(((found.lower <= logits) & (logits <= found.upper)).all())


def test_the_example_of_the_second_input_counts():
    """Correct on the first input of the batch, wrong on the second: the graph of an in-place ReLU read as a copy."""

    class Tail(Dense):
        def forward(self, x):
            h = x - 0.5
            F.relu(h, inplace=True)
            return self.fc(torch.cat([h, x], 1))

    model, x = Tail([[-1.0, 1.0], [0.0, 0.0]], [-0.4, 0.0]), torch.tensor([[0.6], [0.45]])
    result = hf.certify(model, x, torch.tensor([0, 0]), hf.Linf(0.1), "crown")
    adversarial = torch.tensor([[0.6], [0.36]])
    assert model(adversarial).argmax(1).tolist()[1] == 1
    assert not bool(result.certified[1])


def test_a_graph_that_differs_only_in_the_threat_set_is_refused():
    """Graph and model agree on the inputs; in the corner of the box they do not."""
    linear, steep = Dense([[1.0], [0.0]], [0.0, 0.2]), Dense([[1.0], [0.0]], [0.0, 0.2])

    class Bent(Dense):
        def forward(self, x):
            return self.fc(x) + torch.where(x > 0.65, 0.01, 0.0)

    x = torch.full((1, 1), 0.6)
    graph = trace(steep, x)
    bent = Bent([[1.0], [0.0]], [0.0, 0.2])
    check_agreement(graph, linear, x, hf.Linf(0.1))
    check_agreement(graph, bent, x, None)
    with pytest.raises(UnsupportedError, match="threat set"):
        check_agreement(graph, bent, x, hf.Linf(0.1))


def test_the_tolerance_is_the_rounding_of_the_network():
    """A difference of a hundred units in the last place of a small network is no rounding."""
    model = nn.Sequential(nn.Linear(2, 3)).eval()
    other = nn.Sequential(nn.Linear(2, 3)).eval()
    other.load_state_dict(model.state_dict())
    other[0].bias.data += 1e-4
    x = torch.rand(4, 2)
    check_agreement(trace(model, x), model, x, hf.Linf(0.1))
    with pytest.raises(UnsupportedError, match="does not reproduce"):
        check_agreement(trace(model, x), other, x, hf.Linf(0.1))


def test_where_rounding_hides_a_difference_of_logits_there_is_no_proof():
    """2^26 x - 2^26 x + 1 in float32: the rounding bound is near 100, so that it also holds a logit of 1.5."""

    def cancelling(shift, dtype):
        model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2))
        for layer, weight, bias in (
            (model[0], [[2.0**26], [2.0**26]], [0.0, 0.0]),
            (model[1], [[1.0, -1.0], [0.0, 0.0]], [shift, 0.0]),
        ):
            layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
        return model.to(dtype).eval()

    for dtype, message in ((torch.float32, "rounding is too large to tell"), (torch.float64, "tracing does not see")):
        x = torch.full((2, 1), 0.6, dtype=dtype)
        graph = trace(cancelling(1.0, dtype), x)
        check_agreement(graph, cancelling(1.0, dtype), x, hf.Linf(0.1))
        with pytest.raises(UnsupportedError, match=message):
            check_agreement(graph, cancelling(1.5, dtype), x, hf.Linf(0.1))


def test_random_points_lie_in_the_threat_set():
    x = torch.rand(9, 1, 4, 3)
    for threat in (hf.Linf(0.1), hf.L2(0.5), hf.L1(0.5), hf.Patch(2, 1), hf.Sparse(2)):
        points = random_points(threat, x)
        assert bool(threat.contains(points, x).all())
        assert bool((points != x).flatten(1).any(1).all())
    assert len(random_points(hf.Linf(0.1), x[:1])) == 2


def test_the_advice_to_clone_is_sound_advice():
    """A model that clones its input first may write into the clone: the message for writing into x says so."""

    class Clones(Dense):
        def forward(self, x):
            h = x.clone()
            h.sub_(0.5)
            return self.fc(F.relu(h, inplace=True) + x)

    model, x = Clones(*ONE), torch.full((2, 1), 0.6)
    graph = trace(model, x, hf.Linf(0.1))
    assert torch.equal(graph.forward(x), model(x))
    hf.certify(model, x, torch.zeros(2, dtype=torch.long), hf.Linf(0.1), "crown")
    assert torch.equal(x, torch.full((2, 1), 0.6))


def deep(dtype=torch.float32):
    """A residual network whose rounding bounds in float32 are wider than its logits."""
    torch.manual_seed(0)
    return settled(RESIDUAL["bottleneck"]()).to(dtype)


def test_a_deep_network_is_compared_in_float64_where_float32_cannot_tell(monkeypatch):
    monkeypatch.setattr(agreement, "ULPS", 0)  # every difference is judged by the bounds
    model = deep()
    graph, double = trace(model, IMAGES), trace(deep(torch.float64), IMAGES.double())
    with torch.no_grad():
        lower, upper = interval.output_bounds(graph, IMAGES, IMAGES, sound=True)
        assert bool((upper - lower).max() > model(IMAGES).abs().max())
    with pytest.raises(UnsupportedError, match=r"too large to tell: convert model and inputs to float64"):
        check_agreement(graph, model, IMAGES, hf.Linf(0.01))
    check_agreement(graph, model, IMAGES, hf.Linf(0.01), lambda: (double, deep(torch.float64)))


@pytest.mark.parametrize("shift", [1e-5, 1e-2])
def test_what_float32_cannot_tell_from_rounding_float64_can(shift):
    graph, double = trace(deep(), IMAGES), trace(deep(torch.float64), IMAGES.double())
    other, exact = deep(), deep(torch.float64)
    with torch.no_grad():
        for model in (other, exact):
            model.fc.bias += shift * model(IMAGES.to(model.fc.bias)).abs().max()
    for copies in (lambda: (double, exact), lambda: None):
        with pytest.raises(UnsupportedError, match="does not reproduce"):
            check_agreement(graph, other, IMAGES, None, copies)
    # The copies agree, and the model does something else in its own dtype.
    if shift > agreement.CLOSE:
        with pytest.raises(UnsupportedError, match="too large to tell"):
            check_agreement(graph, other, IMAGES, None, lambda: (double, deep(torch.float64)))


class OwnDtype(nn.Module):
    """A deep network behind which a tensor that is no parameter keeps its dtype."""

    def __init__(self):
        super().__init__()
        self.model, self.mixed = deep(), torch.eye(3)

    def forward(self, x):
        return F.linear(self.model(x), self.mixed)


def test_a_deep_network_without_a_copy_in_float64_is_refused_if_rounding_hides_it(monkeypatch):
    monkeypatch.setattr(agreement, "ULPS", 0)
    with pytest.raises(UnsupportedError, match="too large to tell"):
        trace(OwnDtype().eval(), IMAGES)
    pruned = deep()
    prune.l1_unstructured(pruned.fc, "weight", amount=0.1)
    trace(pruned, IMAGES)  # its weight is computed, also in float64


class Counted(nn.Module):
    """A model that counts the inputs it is asked for."""

    def __init__(self, model):
        super().__init__()
        self.model, self.asked = model, []

    def forward(self, x):
        if isinstance(x, torch.Tensor):  # not while it is traced
            self.asked.append(len(x))
        return self.model(x)


@pytest.mark.parametrize("method", ["ibp", "auto"])
def test_a_front_door_asks_the_model_once_for_each_input_and_once_for_each_threat_set(method):
    model = Counted(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()).eval()
    x = torch.rand(10, 4)
    y = model(x).argmax(1)
    model.asked.clear()
    hf.certify(model, x, y, hf.Linf(0.001), method, chunk=5, **({"tight": False} if method == "auto" else {}))
    # The logits by chunks; then for each chunk the points of the threat set, and the first input by itself.
    assert model.asked == [5, 5, 5, 1, 5, 1]


def test_inside_trace_once_inputs_are_compared_once_for_each_threat():
    model, x = Counted(nn.Linear(4, 3).eval()).eval(), torch.rand(6, 4)
    box = hf.Box(torch.full((6, 4), 0.1), batched=True)
    with trace_once(model):
        graph = trace(model, x, hf.Linf(0.1))
        for threat, index in ((hf.Linf(0.1), slice(2, 4)), (hf.Linf(0.1), slice(0, 6))):
            count = len(model.asked)
            assert trace(model, x[index], threat) is graph
            assert len(model.asked) == count
        for threat in (hf.Linf(0.2), box, hf.L2(0.1)):
            count = len(model.asked)
            assert trace(model, x, threat) is graph
            assert len(model.asked) == count + 3
        count = len(model.asked)
        trace(model, x[:3], box.select(slice(0, 3)))
        assert len(model.asked) == count
        trace(model, torch.cat([x[:2], torch.rand(2, 4)]), hf.Linf(0.1))
        assert model.asked[count:] == [2, 2, 1]
        across = x.T.contiguous().T  # in another order in memory
        assert trace(model, across, hf.Linf(0.1)) is graph
        assert model.asked[count:] == [2, 2, 1]
    assert trace(model, x, hf.Linf(0.1)) is not graph


def test_what_was_refused_inside_trace_once_is_refused_again():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval(), torch.rand(4, 3)
    with trace_once(model):
        model[0].register_forward_hook(lambda module, args, output: output + 1)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="forward hook"):
                trace(model, x)
    with trace_once(model, x, torch.rand(4, 2)):
        model[0]._forward_hooks.clear()
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="does not reproduce"):
                trace(model, x)
