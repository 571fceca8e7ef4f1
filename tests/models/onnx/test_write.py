"""A sub-network as an ONNX file with ordinary weights."""

import pytest
import torch

from holdfast.errors import InputError, StorageError
from holdfast.models import load_model, make_model
from holdfast.models.masked import masked
from holdfast.models.onnx import write
from holdfast.models.onnx.write import write_onnx


@pytest.fixture(scope="module")
def model():
    return masked(make_model("cnn", batch_norm=True, hidden=(), input_shape=(1, 8, 6), seed=0), rate=0.8, seed=0).eval()


def test_the_file_is_an_ordinary_network_with_the_same_logits(model, tmp_path):
    again = load_model(write_onnx(model, tmp_path / "net.onnx", (1, 8, 6)))
    x = torch.rand(5, 1, 8, 6)
    assert torch.allclose(again(x), model(x), atol=1e-4)
    assert not any("scores" in name for name, _ in again.named_parameters())


def test_what_cannot_be_written_is_said(model, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"ends in \.onnx"):
        write_onnx(model, tmp_path / "net.pt", (1, 8, 6))
    with pytest.raises(StorageError, match="no folder"):
        write_onnx(model, tmp_path / "none" / "net.onnx", (1, 8, 6))
    monkeypatch.setattr(write, "load_onnx", lambda path: lambda x: model(x) + 1)
    with pytest.raises(StorageError, match="differs from the model by"):
        write_onnx(model, tmp_path / "net.onnx", (1, 8, 6))
    assert not list(tmp_path.iterdir())
