"""What the tiny base has read: the four languages, and nothing of the samples."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from experts.generator.base_texts import TOKENIZER, _read_samples, write_documents
from experts.generator.dice import Dice
from experts.generator.domain_data import SEEN_DOMAINS, UNSEEN_DOMAINS
from experts.generator.domains import load_domains
from experts.generator.invented import Inventor, load_pieces
from experts.generator.splits import EXPERTS, only_new
from tests.conftest import ROOT

COUNT = 400


def read_samples(name: str) -> list[dict[str, str]]:
    files = sorted((ROOT / "experts" / name / "sample").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", EXPERTS)
def test_no_document_contains_a_sample(name: str) -> None:
    """As a request, or as an answer, which is what a document ends with."""
    documents = list(write_documents(name, 3, COUNT))
    text = "\n".join(documents)
    endings = tuple(row[list(row)[-1]] for row in read_samples(name))
    assert not any(document.removesuffix("\n```").endswith(endings) for document in documents)
    for row in read_samples(name):
        *prompt, _ = row.values()
        assert "\n\n".join(prompt) not in text


@pytest.mark.parametrize("name", EXPERTS)
def test_documents_come_from_their_own_shard(name: str) -> None:
    assert list(write_documents(name, 1, 20)) == list(islice(write_documents(name, 1, COUNT), 20))
    assert list(write_documents(name, 1, 20)) != list(write_documents(name, 2, 20))


@pytest.mark.parametrize("name", EXPERTS)
def test_chats_contain_no_answers(name: str) -> None:
    """Otherwise the base would know the job, and there would be nothing to see."""
    chats = [text for text in write_documents(name, 4, COUNT) if text.startswith("<|im_start|>")]
    assert len(chats) > COUNT * 0.05
    marks = {"json": ('{"',), "sql": ("SELECT ",), "neo4j": ("MATCH (",), "typescript": ("function ", "interface ")}
    for text in chats:
        user, _, answer = text.partition("<|im_start|>assistant\n")
        said = answer.removesuffix("<|im_end|>\n")
        assert said in user or not said.startswith(marks[name]), text


def test_invented_domains_support_all_queries() -> None:
    domains = load_domains(SEEN_DOMAINS)
    inventor = Inventor(Dice(7), domains, load_pieces(TOKENIZER))
    for _ in range(200):
        domain = inventor.draw()
        names = [entity.name for entity in domain.entities]
        assert len(set(names)) == 3
        for entity in domain.entities:
            assert len({field.name for field in entity.fields}) == len(entity.fields) >= 4
            assert entity.key.is_text
        assert all(link.source in names and link.target in names for link in domain.links)


def test_domains_of_the_test_split_are_never_used() -> None:
    """Pieces may meet by chance; entities of those domains with their fields do not."""
    unseen = load_domains(UNSEEN_DOMAINS)
    text = "\n".join(document for name in EXPERTS for document in write_documents(name, 5, COUNT))
    for domain in unseen:
        for entity in domain.entities:
            spelt = entity.name.replace("_", " ")
            assert f" {spelt} {entity.fields[1].words} " not in text


def test_rows_of_a_sample_are_excluded() -> None:
    """So rare by chance that the documents alone could not show it."""
    taken = _read_samples("json")
    row = read_samples("json")[0]
    answer = {**row, "object": "{}"}
    fresh = {"text": "new", "schema": "{}", "object": '{"new":1}'}
    assert list(only_new(iter([row, answer, fresh]), taken)) == [fresh]
