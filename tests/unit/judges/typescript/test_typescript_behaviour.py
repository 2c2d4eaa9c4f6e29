"""Code is judged by running it: equivalent code passes, other behaviour fails."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from launcher.judges.typescript.judge import TypescriptJudge
from tests.unit.judges.typescript.typescript_rows import FILM, ask_about_films, needs_compiler, sample

pytest.importorskip("tree_sitter_typescript")
pytestmark = [pytest.mark.process, needs_compiler]
KEEP = "function keep(films: Film[]): Film[] {\n  return films.filter((film) => film.year >= 1990);\n}"
TOP = "function top(films: Film[]): Film[] {\n  return [...films].sort((a, b) => b.year - a.year).slice(0, 5);\n}"
STORE = """class Store {
  private readonly items = new Map<number, Film>();
  add(film: Film): void { this.items.set(film.id, film); }
  get(id: number): Film | undefined { return this.items.get(id); }
}"""
LOAD = """async function load(ids: number[], get: (id: number) => Promise<Film>): Promise<string[]> {
  const films = await Promise.all(ids.map((id) => get(id)));
  return films.map((film) => film.title);
}"""
VIEW = 'type FilmView = Readonly<Pick<Film, "title" | "year">>;'
PATCH = 'type FilmPatch = Partial<Omit<Film, "id">>;'
GENRE = """enum Genre { Jazz = "jazz", Rock = "rock" }
function isGenre(text: string): text is Genre { return Object.values<string>(Genre).includes(text); }"""
GUARD = """function isFilm(value: unknown): value is Film {
  if (typeof value !== "object" || value === null) { return false; }
  const item = value as Record<string, unknown>;
  return typeof item.id === "number" && typeof item.title === "string";
}"""
SAME = [
    (KEEP, "const keep = (films: Film[]): Film[] => films.filter(f => f.year >= 1990)"),
    (
        KEEP,
        "export const keep = function (films: readonly Film[]) { const all: Film[] = []; "
        "for (const f of films) { if (!(f.year < 1990)) all.push(f); } return all; };",
    ),
    (
        KEEP,
        f"{FILM}\nexport default function keep(films: Film[]) {{ "
        "return films.reduce<Film[]>((all, f) => (1990 <= f.year ? [...all, f] : all), []); }",
    ),
    (
        KEEP,
        "const keep = <T extends { year: number }>(all: T[]) => all.flatMap((one) => one.year >= 1990 ? [one] : []);",
    ),
    (
        TOP,
        "function top(films: Film[]) {\n  return films.slice()"
        ".sort((a, b) => a.year < b.year ? 1 : a.year > b.year ? -1 : 0)"
        ".filter((_, i) => i < 5); }",
    ),
    (
        STORE,
        "class Store { #all: Record<number, Film> = {}; add(film: Film) { this.#all[film.id] = film; } "
        "get(id: number): Film | undefined { return this.#all[id]; } }",
    ),
    (
        LOAD,
        "async function load(ids: number[], get: (id: number) => Promise<Film>) {  "
        "const all: string[] = []; for (const id of ids) "
        "{ await new Promise<void>((done) => setTimeout(done, 10)); all.push((await get(id)).title); } return all; }",
    ),
    (VIEW, "interface FilmView { readonly year: number; readonly title: string }"),
    (PATCH, "type FilmPatch = { [K in Exclude<keyof Film, 'id'>]?: Film[K] };"),
    (
        GENRE,
        "export enum Genre { Rock = 'rock', Jazz = 'jazz' }\n"
        "export const isGenre = (text: string): text is Genre => text === Genre.Jazz || text === Genre.Rock;",
    ),
    (
        GUARD,
        "function isFilm(value: unknown): value is Film { return "
        "typeof value === 'object' && !!value && 'id' in value && "
        "typeof value.id === 'number' && 'title' in value && typeof value.title === 'string'; }",
    ),
]
OTHER = [
    *(
        (
            f"function f(n: number): number {{ return n > {limit} ? 1 : 0; }}",
            "function f(n: number): number { return 0; }",
            "behaves differently",
        )
        for limit in (50, 7_000, 1_000_000)
    ),
    (KEEP, KEEP.replace(">=", ">"), "behaves differently"),
    (KEEP, KEEP.replace("keep", "kept"), "behaves differently from the reference in 50 of 50 cases"),
    (KEEP, "async " + KEEP.replace(": Film[] {", ": Promise<Film[]> {"), "behaves differently"),
    (KEEP, "function keep(films: Film[]): Film[] { return []; }", "behaves differently"),
    (KEEP, KEEP.replace("  return", "  console.log(films.length);\n  return"), "behaves differently"),
    (TOP, TOP.replace("[...films]", "films"), "behaves differently"),  # it changes what it was given
    (TOP, TOP.replace("5", "6"), "behaves differently"),
    (STORE, STORE.replace("set(film.id, film)", "set(film.year, film)"), "behaves differently"),
    (STORE, STORE.replace("get(id: number)", "find(id: number)"), "behaves differently"),
    (LOAD, LOAD.replace("get(id)", "get(id).catch(() => ({ title: '' }) as Film)"), "behaves differently"),
    (VIEW, "interface FilmView { year: number; readonly title: string }", "FilmView is a different type"),
    (VIEW, "type FilmView = Readonly<Pick<Film, 'title'>>;", "FilmView is a different type"),
    (PATCH, "type FilmPatch = any;", "FilmPatch is a different type"),
    (PATCH, "type FilmPatch = Partial<Film>;", "FilmPatch is a different type"),
    (PATCH, "type Patch = Partial<Omit<Film, 'id'>>;", "does not declare FilmPatch"),
    (GENRE, GENRE.replace('"rock"', '"folk"'), "behaves differently"),
    (GUARD, GUARD.replace('=== "number" &&', '=== "number" ||'), "behaves differently"),
    (GUARD, GUARD.replace(" || value === null", ""), "behaves differently"),
]


def test_equivalent_code_passes(judge: TypescriptJudge) -> None:
    verdicts = judge.judge([ask_about_films(reference) for reference, _ in SAME], [answer for _, answer in SAME])
    assert [
        one.reason for one in verdicts if one.checks["behaves"] is not True or one.checks["types"] is not True
    ] == []
    assert {one.checks["equal"] for one in verdicts} == {False}
    assert {one.reason for one in verdicts} == {"differs from the reference"}


def test_code_with_other_behaviour_fails(judge: TypescriptJudge) -> None:
    verdicts = judge.judge(
        [ask_about_films(reference) for reference, _, _ in OTHER], [answer for _, answer, _ in OTHER]
    )
    for (_, answer, reason), verdict in zip(OTHER, verdicts, strict=True):
        assert verdict.checks["types"] is True, (answer, verdict.reason)
        assert verdict.checks["behaves"] is False, answer
        assert reason in verdict.reason


Change = tuple[str, str | Callable[[re.Match[str]], str]]
MUTATIONS: dict[str, Change] = {
    "<": (r" < ", " <= "),
    "<=": (r" <= ", " < "),
    ">": (r" > ", " >= "),
    ">=": (r" >= ", " > "),
    "===": (r" === ", " !== "),
    "!==": (r" !== ", " === "),
    "&&": (r"\s&& ", " || "),
    "+": (r" \+ ", " - "),
    "some": (r"\.some\(", ".every("),
    "every": (r"\.every\(", ".some("),
    "startsWith": (r"\.startsWith\(", ".includes("),
    "endsWith": (r"\.endsWith\(", ".includes("),
    "includes": (r'\.includes\("', '.startsWith("'),
    "number": (r"(?<=[ (])(\d+(?:\.\d+)?)(?=[;)\]])", lambda m: str(float(m[1]) + 1)),
    "string": (r'(?<=[ (\[])"(\w)', r'"Q\1'),
    "order": (r"\(a, b\) => a\.(\w+) - b\.\1", r"(a, b) => b.\1 - a.\1"),
    "dates": (r"a\.(\w+)\.localeCompare\(b\.", r"b.\1.localeCompare(a."),
    "unsorted": (r"\.sort\(\)", ""),
    "not": (r"\.filter\(\((\w+)\) => (\w+\.\w+)\)", r".filter((\1) => !\2)"),
    "input": (r"\[\.\.\.(\w+)\]\.sort", r"\1.sort"),
    "?? 0": (r"\?\? 0", "?? 1"),
    "?? text": (r'\?\? "', '?? "Z'),
    "catch": (r"return \[\];", "throw 1;"),
    "text": (r"\): \$", "); $"),
    "type": (r"^(  \w+)\??: (\w+);", r"\1: \2 | boolean;"),
}


@pytest.mark.parametrize(("num_rows", "least"), [(10, 17), pytest.param(56, 100, marks=pytest.mark.slow)])
def test_changed_operators_properties_and_literals_are_rejected(
    judge: TypescriptJudge, num_rows: int, least: int
) -> None:
    rows, answers = [], []
    for row in sample("train", num_rows):
        for pattern, change in MUTATIONS.values():
            mutant = re.sub(pattern, change, row.reference, count=1, flags=re.M)
            if mutant != row.reference:
                rows.append(row)
                answers.append(mutant)
    verdicts = judge.judge(rows, answers)
    survivors = [answer for answer, one in zip(answers, verdicts, strict=True) if one.checks["behaves"] is not False]
    assert len(verdicts) > least
    assert len(survivors) / len(verdicts) <= 0.005, survivors


@pytest.mark.parametrize(
    ("parameters", "condition"),
    [
        ("n: number, m: number", "n > 50 && m < 7"),
        ("n: number, m: number", "n > 530 && m > 71"),
        ("n: number, m: number, o: number", "m < -40 && n > 300"),
        ("film: Film, least: number", "film.year > 2090 && least > 870"),
        ("n: number, kind: string", 'n > 530 && kind === "gold"'),
        ("a: string, b: string", 'a === "silver" && b === "gold"'),
    ],
)
def test_a_condition_on_two_values_is_met(judge: TypescriptJudge, parameters: str, condition: str) -> None:
    """In the answer, or in the reference."""
    plain = f"function f({parameters}): number {{ return 1; }}"
    special = f"function f({parameters}): number {{ if ({condition}) return 2; return 1; }}"
    rows = [ask_about_films(plain), ask_about_films(special), ask_about_films(special)]
    verdicts = judge.judge(rows, [special, plain, special.replace("return 2", "return 3")])
    assert [one.checks["behaves"] for one in verdicts] == [False, False, False]


def test_judging_is_deterministic(judge: TypescriptJudge) -> None:
    rows = sample("validation", 6)
    answers = [row.reference.replace(">", ">=") for row in rows]
    assert judge.judge(rows, answers) == judge.judge(rows, answers)


def test_code_that_cannot_run_is_not_judged_by_behaviour(judge: TypescriptJudge) -> None:
    reference = "function f(open: WeakMap<object, string>, key: object): string | undefined { return open.get(key); }"
    verdict = judge.judge([ask_about_films(reference)], [reference])[0]
    assert dict(verdict.checks) == {"parses": True, "types": True, "behaves": None, "equal": True}
