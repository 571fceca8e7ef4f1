"""A folder of runs with everything that a page may meet, and secrets beside it."""

import json
import os
from datetime import UTC, datetime

import holdfast as hf

SECRET = "the-secret-beside-the-runs"
REPORT = """<!doctype html><html lang="en"><head><title>Report of first</title>
<style>h1 { color: #0068a8 }</style></head><body><main><h1>Report of first</h1><p id="p">static</p></main>
<script>document.getElementById("p").textContent = "script ran"</script></body></html>"""

HISTORY = """epoch,learning_rate,train_loss,train_accuracy,validation_clean,validation_robust,validation_certified
1,0.1,2.0,0.5,0.5,0.1,0.0
2,0.1,1.0,0.75,0.7,0.3,0.2
3,0.01,0.5,0.9,0.8,0.4,0.25
"""


def progress(**changes):
    bracket = {"threat": "linf:0.1", "budget": 0.1, "inputs": 200, "clean": 190, "certified": 120, "attacked": 150}
    note = {
        "state": "running",
        "name": "digits",
        "data": "mnist-mini",
        "created": "2026-01-02T03:04:05+00:00",
        "updated": datetime.now(UTC).isoformat(),
        "step": "attack at linf:0.1",
        "done": 30,
        "total": 200,
        "seconds": 12.5,
        "error": None,
        "brackets": [bracket],
    }
    return note | changes


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def answer():
    """Of an audit, as in audit.json."""
    levels = [{"inputs": 200, "certified": 190, "attacked": 190}, {"inputs": 200, "certified": 140, "attacked": 144}]
    brackets = [{"threat": "linf:0.1", "levels": levels}]
    words = {"name": "digits", "data": "mnist-mini", "created": "2026-01-02", "headline": "Between 70 % and 72 % hold."}
    return {"schema_version": 2, **words, "brackets": brackets}


def fill(runs):
    """Runs of every kind below `runs`; secrets beside it, with links that lead to them."""
    outside = runs.parent / "outside"
    write(outside / "report.html", SECRET)
    write(outside / "audit.json", json.dumps({"headline": SECRET}))
    write(runs.parent / "secret.txt", SECRET)
    first = runs / "first"
    write(first / "audit.json", answer())
    write(first / "progress.json", progress(state="finished", done=200))
    write(first / "report.html", REPORT)
    write(first / "results.csv", "position,label\n0,7\n")
    write(first / "model-card.md", "# digits\n")
    (first / "badge.svg").symlink_to(runs.parent / "secret.txt")
    write(first / "private.txt", SECRET)
    write(runs / "group" / "live" / "progress.json", progress())
    write(runs / "old" / "audit.json", answer())
    write(runs / "broken" / "progress.json", '{"state": "runn')
    write(runs / "failed" / "progress.json", progress(state="failed", error="disk full"))
    write(runs / "killed" / "audit.sqlite", SECRET)
    write(runs / ".hidden" / "audit.json", {"headline": SECRET})
    (runs / "link").symlink_to(outside)
    trained = runs / "trained"
    write(trained / "run.json", {"data": "mnist-mini"})
    write(trained / "history.csv", HISTORY)
    hf.save_model(small_model(), trained / "model.safetensors")
    write(runs / "elsewhere" / "run.json", {"data": os.fspath(outside)})
    hf.save_model(small_model(), runs / "elsewhere" / "model.safetensors")
    return runs


def small_model():
    return hf.make_model("linear", seed=1).eval()
