"""The list of models, as both SDKs read it."""

import json

import pytest

from extproc.dialects import models_answer

NAMES = ["gpt-5", "org/qwen3", "ft:x:1", "模型"]


def test_the_list_satisfies_both_sdks(openai_answered, anthropic_answered):
    """One shape has what each of them asks for."""
    answer = json.loads(models_answer(NAMES))
    with openai_answered(200, [], models_answer(NAMES)) as openai:
        assert [model.id for model in openai.models.list()] == NAMES
    with anthropic_answered(200, [], models_answer(NAMES)) as anthropic:
        assert [model.display_name for model in anthropic.models.list()] == NAMES
    assert answer["object"] == "list"
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, "gpt-5", "模型")


def test_an_empty_list_has_no_ends():
    """No model, no first one."""
    answer = json.loads(models_answer([], "/v1/models?limit=10"))
    assert (answer["data"], answer["first_id"], answer["last_id"]) == ([], None, None)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models/gpt-5", "gpt-5"),
        ("/v1/models/gpt-5?x=1", "gpt-5"),
        ("/v1/models/org/qwen3", "org/qwen3"),
        ("/v1/models/org%2Fqwen3", "org/qwen3"),
        ("/v1/models/ft%3Ax%3A1", "ft:x:1"),
        ("/v1/models/other", None),
        ("/v1/models/", None),
        ("/v1/elsewhere", None),
    ],
)
def test_one_model(path, name):
    """By its name, escaped or not; None for a stranger."""
    answer = models_answer(NAMES, path)
    assert answer is None if name is None else json.loads(answer)["id"] == name
