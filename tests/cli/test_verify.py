"""`holdfast verify` answers as the verification competitions expect."""

import gzip
import re

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.errors import InputError

TEXT = """(declare-const X_0 Real)
(declare-const Y_0 Real)
(assert (>= X_0 0.0))
(assert (<= X_0 1.0))
(assert (>= Y_0 LIMIT))
"""


@pytest.fixture
def network(tmp_path):
    """y = relu(2 x - 1)."""
    constants = {"w": np.float32([[2.0]]), "b": np.float32([-1.0])}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 1))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    path = tmp_path / "net.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=6), path)
    return path


def ask(network, tmp_path, limit, *more):
    prop = tmp_path / "p.vnnlib.gz"
    prop.write_bytes(gzip.compress(TEXT.replace("LIMIT", limit).encode()))
    return CliRunner().invoke(app, ["verify", str(network), str(prop), *more])


def test_a_property_that_holds_is_unsat(network, tmp_path):
    done = ask(network, tmp_path, "1.5", "--results", str(tmp_path / "r.txt"))
    assert done.exit_code == 0
    assert done.stdout == "unsat\n"
    assert (tmp_path / "r.txt").read_text() == "unsat\n"


def test_a_violated_one_is_sat_with_a_counter_example(network, tmp_path):
    done = ask(network, tmp_path, "0.5", "--results", str(tmp_path / "r.txt"))
    found = re.fullmatch(r"sat\n\(\(X_0 (\S+)\)\n\(Y_0 (\S+)\)\)\n", done.stdout)
    assert found
    x, y = map(float, found.groups())
    assert 0.75 <= x <= 1
    assert y == pytest.approx(2 * x - 1)
    assert (tmp_path / "r.txt").read_text() == done.stdout


def test_bad_questions_are_refused_in_a_line(network, tmp_path):
    done = ask(network, tmp_path, "0.5", "--timeout", "0")
    assert isinstance(done.exception, InputError)
    assert "--timeout 0: expected a number of seconds > 0" in str(done.exception)
    wrong = ask(network, tmp_path, "Y_3")
    assert "p.vnnlib.gz, line 5: 'Y_3' is not declared" in str(wrong.exception)
    more = ask(network, tmp_path, "0.5)) (declare-const X_1 Real) (assert (<= X_1 1)) (assert (>= X_1 0")
    assert "2 inputs X, the network takes 1 values" in str(more.exception)


def test_an_error_is_written_to_the_file_of_results_too(network, tmp_path):
    done = ask(network, tmp_path, "one", "--results", str(tmp_path / "r.txt"))
    assert isinstance(done.exception, InputError)
    assert (tmp_path / "r.txt").read_text() == "error\n"
