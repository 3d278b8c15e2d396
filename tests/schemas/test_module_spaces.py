"""Spaces by module id, as today's peers and peers of the previous minor version send them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.chunks.module_spaces import (
    MOST_MODULES,
    check_mapping_table,
    check_module_ids,
    module_spaces_from_json,
    module_spaces_to_json,
)
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import DecodeError

ONE = Spaces(observation=Box(shape=(3,), dtype="<f4"), action=Discrete(n=2))
TWO = Spaces(observation=Discrete(n=5), action=Box(shape=(2,), dtype="<f4"))


@pytest.mark.parametrize("by_module", [{"default_policy": ONE}, {"one": ONE, "two": TWO}, {"observation": ONE}])
def test_module_spaces_are_read_as_they_were_written(by_module: dict[str, Spaces]) -> None:
    told = module_spaces_to_json(by_module)
    assert module_spaces_from_json(told) == by_module
    assert list(module_spaces_from_json(told)) == list(by_module)


def test_the_pair_of_protocol_1_0_is_read_as_that_of_the_default_policy() -> None:
    assert module_spaces_from_json(ONE.model_dump(mode="json")) == {"default_policy": ONE}


def test_modules_may_be_named_observation_and_action() -> None:
    by_module = {"observation": ONE, "action": TWO}
    assert module_spaces_from_json(module_spaces_to_json(by_module)) == by_module


@pytest.mark.parametrize(
    "told",
    [
        *(None, {}, [], {"one": None}, {"one": {"observation": {"kind": "x"}}}, {"a": {"b": 1}}),
        *({name: ONE.model_dump(mode="json")} for name in ("", "a/b")),
        {str(i): ONE.model_dump(mode="json") for i in range(MOST_MODULES + 1)},
    ],
)
def test_malformed_module_spaces_are_a_decode_error(told: Any) -> None:
    with pytest.raises(DecodeError, match="bad_space"):
        module_spaces_from_json(told)


@pytest.mark.parametrize("ids", [["a/b"], [""], [3], ["a", None]])
def test_a_policy_id_that_is_empty_no_text_or_has_a_slash_is_refused(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="no name for a policy; give a non-empty string without '/'"):
        check_module_ids(ids)


def test_a_config_of_no_policies_or_more_than_512_is_refused() -> None:
    check_module_ids([str(i) for i in range(MOST_MODULES)])
    with pytest.raises(ValueError, match="at least one policy"):
        check_module_ids([])
    with pytest.raises(ValueError, match="there are 513 policies; at most 512"):
        check_module_ids([str(i) for i in range(MOST_MODULES + 1)])


def test_a_mapping_table_with_an_unknown_policy_is_refused_by_name() -> None:
    check_mapping_table({"a": "one"}, ["one", "two"])
    with pytest.raises(ValueError, match=r"agent 'b' is mapped to 'three'; the policies are \['one', 'two'\]"):
        check_mapping_table({"a": "one", "b": "three"}, ["one", "two"])
