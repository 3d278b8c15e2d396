"""Each error carries its facts, says them in a sentence, and knows the exit code of its process."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.schemas import errors
from headrace.schemas.accounts.redis_keys import TABLE, WEIGHTS_BLOB, key_name


def _all(base: type[errors.HeadraceError]) -> Iterator[type[errors.HeadraceError]]:
    for cls in base.__subclasses__():
        if cls.__module__ == errors.__name__:
            yield cls
        yield from _all(cls)


def test_the_docstring_of_the_module_draws_every_error() -> None:
    assert errors.__doc__ is not None
    for cls in _all(errors.HeadraceError):
        assert f"── {cls.__name__} " in errors.__doc__, cls.__name__
        assert isinstance(cls.exit_code, errors.ExitCode)
        assert cls.__doc__


def test_facts_are_attributes_and_part_of_the_sentence() -> None:
    error = errors.EnvRestartBudgetError(3, 8, 60.0, "RuntimeError: diverged")
    assert (error.env_index, error.failures, error.window_s) == (3, 8, 60.0)
    assert str(error).startswith("env 3 failed 8 times within 60 s and is given up (last: RuntimeError: diverged)")
    assert str(errors.ConfigError("bad", key="a.b", source="flag")) == "a.b: bad (from flag)"


def test_unfit_weights_name_five_tensors_and_count_the_others() -> None:
    error = errors.WeightsMismatchError(list("abcdefg"), list("ABCDE"), {})
    assert "missing ['a', 'b', 'c', 'd', 'e'] and 2 more, unknown ['A', 'B', 'C', 'D', 'E'];" in str(error)


def test_an_error_about_redis_does_not_show_the_password() -> None:
    error = errors.RedisUnavailableError("redis://:secret@host:1/0", "refused")
    assert "secret" not in str(error)
    assert error.endpoint == "redis://***@host:1/0"
    assert error.exit_code is errors.ExitCode.REDIS_UNAVAILABLE


def test_all_keys_of_a_fleet_share_one_hash_tag() -> None:
    names = [key_name("my-fleet", key, version="1/2") for key in TABLE]
    assert len(set(names)) == len(TABLE)
    assert all(name.startswith("headrace:{my-fleet}:") for name in names)
    assert key_name("f", WEIGHTS_BLOB, version="1/2") == "headrace:{f}:weights:blob:1/2"
    for key in TABLE:
        assert key.meaning
        assert key.writer
