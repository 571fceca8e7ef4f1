"""An audit translates the model once, however many proofs it tries."""

import torch
from torch import nn

import holdfast as hf
from holdfast.bounding.graph import trace


def test_an_audit_translates_the_model_once(monkeypatch):
    translate, calls = trace.Translator.translate, []

    def counted(self, *given):
        calls.append(given)
        return translate(self, *given)

    monkeypatch.setattr(trace.Translator, "translate", counted)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.rand(12, 4)
    hf.audit(model, (x, model(x).argmax(1)), "linf:0.1", n=12, budget="quick", budgets=2, progress=False)
    assert len(calls) == 1
