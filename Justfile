# The commands of a working day. `just` lists them.

default:
    @just --list

# Everything that CI checks, except the source downloads.
check: lint types test

lint:
    ruff check
    ruff format --check

types:
    mypy

test *arguments:
    pytest -n auto {{arguments}}

# Source trees of the vLLM releases that the third-party tests run on.
sources:
    python tests/thirdparty/sources.py 0.13.0 0.18.0 0.19.0 0.23.0 0.24.0 0.25.0 0.29.0 0.30.0 0.32.0 0.33.0

fuzz target *arguments:
    kvfuzz run {{target}} {{arguments}}

replay *seeds:
    kvfuzz replay {{seeds}}
