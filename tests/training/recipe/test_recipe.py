import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import InputError, Linf, StorageError, UnsupportedError
from holdfast.training import list_recipes, load_recipe, parse_override
from holdfast.training.recipe import reading
from holdfast.training.recipe.recipe import to_table, to_toml
from holdfast.utils.options import Choice

BASE = {"epochs": 3, "objective": {"name": "standard"}, "optimizer": {"lr": 0.1}}
AT = {"objective": {"name": "at"}, "threat": "l2:1"}


def test_shipped_recipes_are_valid_and_say_what_they_need():
    listed = list_recipes()
    assert {"mnist-mini-standard", "mnist-mini-at", "mnist-at", "cifar10-at"} <= {entry.name for entry in listed}
    for entry in listed:
        recipe = load_recipe(entry.name)
        assert recipe.summary
        assert recipe.needs
        assert entry.adversary == recipe.adversary
        for key in ("name", "summary", "needs", "data", "threat", "model"):
            assert getattr(entry, key) == getattr(recipe, key)
        assert entry.objective.name == recipe.objective.name
        for key, value in entry.objective.options.items():
            assert recipe.objective.options[key] == (tuple(value) if isinstance(value, list) else value)


def test_the_list_of_recipes_validates_none_of_them(monkeypatch):
    def fail(*_):
        raise AssertionError

    reading._listed.cache_clear()
    monkeypatch.setattr(reading, "resolved", fail)
    assert len(list_recipes()) > 100


def test_published_settings():
    cifar = load_recipe("cifar10-at")
    assert cifar.adversary == Linf(8 / 255)
    assert cifar.attack.options["step_size"] == 2 / 255
    assert (cifar.epochs, cifar.optimizer.lr, cifar.optimizer.weight_decay) == (200, 0.1, 5e-4)
    mnist = load_recipe("mnist-at")
    assert (mnist.threat, mnist.attack.options["steps"], mnist.attack.options["step_size"]) == (
        "linf:0.3",
        40,
        0.01,
    )


def test_defaults_of_objective_and_schedule_are_written_out():
    recipe = load_recipe({**BASE, "threat": "l2:1", "objective": {"name": "at"}, "learning_rate": {"name": "cosine"}})
    assert recipe.attack == Choice(
        "pgd",
        {
            "steps": 10,
            "step_size": None,
            "per_budget": False,
            "random_start": True,
            "mode": "eval",
            "precision": "full",
        },
    )
    assert recipe.learning_rate == Choice("cosine", {"final": 0.0})


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_toml_reads_back(name):
    average = {} if load_recipe(name).periods else {"average": {"name": "ema"}}  # they exclude each other
    recipe = load_recipe(name, {**average, "optimizer.clip_norm": 1.0})
    assert load_recipe(tomllib.loads(to_toml(recipe))) == recipe


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    texts,
    st.floats(1e-12, 1e12),
    st.integers(1, 10**9),
    st.dictionaries(texts.filter(lambda k: k != "name"), st.lists(st.floats(-1e9, 1e9) | st.booleans() | texts)),
)
def test_any_recipe_reads_back(text, lr, epochs, options):
    options["table"] = {"deep": [1, [2.5]], "a b": text}
    table = {**BASE, "summary": text, "epochs": epochs, "optimizer": {"lr": lr}, "model": {"name": "mlp", **options}}
    recipe = load_recipe(table)
    assert load_recipe(tomllib.loads(to_toml(recipe))) == recipe


def test_file_folder_recipe_and_dict_are_the_same(tmp_path):
    recipe = load_recipe(BASE, {"name": "recipe"})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert load_recipe(str(tmp_path / "recipe.toml")) == recipe
    assert load_recipe(tmp_path) == recipe
    assert load_recipe(recipe) == recipe
    assert load_recipe(to_table(recipe)) == recipe


def test_overrides_nested_and_dotted():
    recipe = load_recipe("cifar10-at", {"optimizer": {"nesterov": True}, "optimizer.lr": 0.3, "epochs": 5})
    assert (recipe.optimizer.lr, recipe.optimizer.nesterov, recipe.optimizer.weight_decay) == (0.3, True, 5e-4)
    assert recipe.epochs == 5


def test_another_name_drops_the_options_of_the_old_one():
    recipe = load_recipe("cifar10-at", {"learning_rate.name": "cosine", "objective.name": "standard"})
    assert recipe.learning_rate == Choice("cosine", {"final": 0.0})
    assert recipe.objective == Choice("standard", {})
    assert recipe.attack is None
    assert load_recipe("cifar10-at", {"objective.name": "at"}).attack.options["step_size"] == 2 / 255


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=0.1", ("optimizer.lr", 0.1)),
        ("epochs = 3", ("epochs", 3)),
        ("augment.flip=true", ("augment.flip", True)),
        ("learning_rate.milestones=[1, 2]", ("learning_rate.milestones", [1, 2])),
        ("threat=linf:8/255", ("threat", "linf:8/255")),
        ('summary="a=b"', ("summary", "a=b")),
    ],
)
def test_override_texts(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["epochs", "=3", "epochs=", 'summary="open', "a=[1"])
def test_bad_override_texts(text):
    with pytest.raises(InputError, match="cannot read"):
        parse_override(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer.lr": "x"}, r"optimizer\.lr: expected a number > 0, got 'x'"),
        ({"optimizer.lr": -0.1}, r"optimizer\.lr: expected a number > 0, got -0\.1"),
        ({"optimizer.lr": float("nan")}, r"optimizer\.lr: expected a number > 0"),
        ({"optimizer.lr": True}, r"optimizer\.lr: expected a number > 0, got True"),
        ({"optimizer.momentum": 1}, r"optimizer\.momentum: expected a number >= 0 and < 1, got 1"),
        ({"optimizer.lrr": 1}, r"optimizer\.lrr: unknown key\. Did you mean 'lr'\?"),
        ({"optimizer.name": "sdg"}, r"optimizer\.name: unknown value 'sdg'\. Did you mean 'sgd'\?"),
        ({"optimizer": 3}, r"optimizer: expected a table, got 3"),
        ({"optimizer": {"nesterov": True, "momentum": 0}}, r"optimizer\.nesterov: needs optimizer\.momentum > 0"),
        ({"epoch": 3}, r"epoch: unknown key\. Did you mean 'epochs'\?"),
        ({"epochs": 0}, r"epochs: expected an integer >= 1, got 0"),
        ({"epochs": 2.5}, r"epochs: expected an integer >= 1, got 2\.5"),
        ({"validation": 1.0}, r"validation: expected a number >= 0 and < 1"),
        ({"augment.flip": 1}, r"augment\.flip: expected true or false, got 1"),
        ({"threat": "linf:-0.1"}, r"threat: the budget of 'linf' must be .* >= 0, got -0\.1"),
        ({"threat": "lif:1"}, r"threat: unknown threat 'lif'.*Did you mean"),
        ({"objective": {"steps": 3}}, r"objective\.steps: unknown option\. Known: none"),
        ({"objective.name": "standrd"}, r"objective\.name: unknown name 'standrd'\. Did you mean 'standard'"),
        ({"objective": "at"}, r"objective: expected a table with a name, got 'at'"),
        ({"objective.name": "at"}, r"threat: missing; the objective 'at' needs one"),
        ({**AT, "attack": {"name": "pgd", "steps": "x"}}, r"attack\.steps: expected an integer >= 1, got 'x'"),
        ({**AT, "attack": {"name": "pgd", "steps": 0}}, r"attack\.steps: expected an integer >= 1, got 0"),
        ({**AT, "attack": {"name": "pgd", "mode": "evl"}}, r"attack\.mode: unknown value 'evl'"),
        ({**AT, "attack": {"name": "pdg"}}, r"attack: unknown name 'pdg'\. Did you mean 'pgd'"),
        ({**AT, "attack": {"name": "trh"}}, r"attack: 'trh' does not fit here, it goes into \[regularizers\.trh\]"),
        ({**AT, "attack": {"name": "n-fgsm"}}, r"attack: method 'n-fgsm' does not handle the threat 'l2:1'"),
        ({**AT, "regularizers": {"trh": {"weigth": 1.0}}}, r"regularizers\.trh\.weigth: unknown option\. Did you mean"),
        ({**AT, "regularizers": {"trh": {"weight": -1.0}}}, r"regularizers\.trh\.weight: expected a number >= 0"),
        ({**AT, "regularizers": {"awp": {}}}, r"regularizers\.awp: 'awp' does not fit here, it goes into \[perturb_"),
        ({**AT, "regularizers": {"trh": 3}}, r"regularizers\.trh: expected a table, got 3"),
        ({**AT, "targets": {"name": "geometry"}, "attack": {"name": "fgsm"}}, r"targets\.name: 'geometry' counts"),
        ({"attack": {"name": "pgd"}}, r"attack: the objective 'standard' has no such part; it takes: targets"),
        ({"periods": [1, 5]}, r"periods: expected rising epochs that end with epochs = 3, got \[1, 5\]"),
        ({"periods": [1, 3], "average.name": "ema"}, r"periods: excludes average"),
        ({"extra": {"data": "x", "share": 2.0}}, r"extra\.share: expected a number between 0 and 1, got 2\.0"),
        ({"evaluate.patience": 2, "validation": 0}, r"evaluate\.patience: needs validation > 0"),
        ({"evaluate.patience": 0}, r"evaluate\.patience: expected an integer >= 1, got 0"),
        (
            {**AT, "objective": {"name": "alp"}, "regularizers": {"trh": {"network": "full"}}},
            r"regularizers\.trh\.estimator: 'exact' is for the cross-entropy at x'",
        ),
        ({"learning_rate.name": "cosin"}, r"learning_rate\.name: unknown schedule 'cosin'\. Did you mean 'cosine'"),
        ({"learning_rate.name": "step"}, r"learning_rate\.every: missing"),
        ({"learning_rate": {"name": "step", "every": -1}}, r"learning_rate: the step schedule needs every > 0"),
        ({"learning_rate": {"name": "multistep", "milestones": 3}}, r"learning_rate\.milestones: expected a list"),
        ({"learning_rate": {"name": "multistep", "milestones": ["a"]}}, r"milestones\[0\]: expected a number, got 'a'"),
        ({"budget": {"name": "linear", "start": -1, "end": 3}}, r"budget: a rising budget needs 0 <= start"),
        ({"budget": {"name": "linear", "end": 3}, "threat": "patch:2x2"}, r"cannot be scaled"),
        ({"budget": {"nam": "linear"}}, r"budget\.name: missing"),
        ({"average": {"name": "swa", "start_epoch": 3}}, r"average\.start_epoch: expected an epoch before the last, 2"),
        ({"evaluate.select": "robust"}, r"evaluate\.select: 'robust' needs a threat"),
    ],
)
def test_bad_recipes_name_the_key(change, message):
    with pytest.raises(InputError, match=message):
        load_recipe(BASE, change)


def test_missing_keys_are_named():
    with pytest.raises(InputError, match=r"epochs: missing"):
        load_recipe({})
    with pytest.raises(InputError, match=r"optimizer\.lr: missing"):
        load_recipe({**BASE, "optimizer": {}})


def test_objective_refuses_a_threat_it_does_not_handle():
    with pytest.raises(UnsupportedError, match="patch:2x2"):
        load_recipe({**BASE, "objective": {"name": "at"}, "threat": "patch:2x2"})


def test_unknown_recipe_and_bad_files(tmp_path):
    with pytest.raises(InputError, match=r"unknown recipe 'mnist-mini-ad'\. Did you mean 'mnist-mini-at'"):
        load_recipe("mnist-mini-ad")
    with pytest.raises(StorageError, match=r"cannot read the recipe .*none\.toml: No such file"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("epochs = = 3")
    with pytest.raises(InputError, match=r"bad\.toml is not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_what_toml_cannot_hold_is_refused():
    recipe = load_recipe(BASE, {"model": {"name": "mlp", "odd": object()}})
    with pytest.raises(InputError, match=r"a recipe holds texts, numbers, lists and tables, got <object"):
        to_toml(recipe)


def test_selection():
    attacked = {"threat": "l2:1", "objective": {"name": "at"}}
    assert load_recipe(BASE, {"threat": "l2:1"}).selects == "clean"  # a baseline is not chosen for its robustness
    assert load_recipe(BASE, {"threat": "l2:1", "evaluate.select": "robust"}).selects == "robust"
    assert load_recipe(BASE, attacked).selects == "robust"
    assert load_recipe(BASE, {**attacked, "evaluate.select": "clean"}).selects == "clean"
    assert load_recipe(BASE, {**attacked, "evaluate.attack_steps": 0}).selects == "clean"
