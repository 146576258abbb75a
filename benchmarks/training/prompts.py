"""Prompts that a target answers itself, to train its drafters on.

    python benchmarks/training/prompts.py DATASETS_DIR OUT.jsonl.gz [--model smollm2]

DATASETS_DIR holds the files of ``benchmarks/training/README.md``. A line of OUT is
``{"prompt_token_ids", "temperature"}`` and for sampled answers ``"seed"``, as
``sametoken train text`` reads it. Greedy prompts come first, because acceptance is measured with
greedy answers: a run out of time leaves out sampled ones.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sources import exercise, fenced, instructed, mbpp_rows, package_sources, read_rows

from sametoken.models.names import resolve_model
from sametoken.text.tokenizer import load_tokenizer

# A prompt's kind and text; SAMPLES counts the sampled answers beside the greedy one, by kind.
KindAndPrompt = tuple[str, str]
SAMPLES = {
    "gsm8k": 1,
    "gsm8k-styles": 0,
    "self-instruct": 8,
    "exercism": 2,
    "mbpp": 1,
    "stubs": 1,
    "general": 1,
}
PACKAGES = (
    "sympy=900 networkx=600 sklearn=300 scipy=500 pandas=300 numpy=300 transformers=300 "
    "rich=50 jinja2=60 mypy=200 stdlib=900"
)
STYLED, GENERAL = 2500, 5200
STYLES = (
    "{}\n\nSolve it step by step.",
    "{} Explain your reasoning.",
    "Write a Python program that answers this question: {}",
    "Rewrite this problem in your own words: {}",
    "Write a short story based on this: {}",
)
CODE_TASKS = (
    "Add docstrings to this Python code:",
    "Explain what this Python code does:",
    "Rewrite this Python code with type hints:",
)
STUB_TASK = "Complete this Python function. Answer with the whole function."
EXAMPLE = re.compile(r"assert (.+?) ?== ?(.+)$")
TASK_VERB = re.compile(r"^Write a (python )?function (to|that|which) ", re.IGNORECASE)
TOPICS = """\
photosynthesis|black holes|the French Revolution|machine learning|gardening|chess|jazz music|\
climate change|the stock market|sourdough bread|electric cars|ancient Rome|meditation|volcanoes|\
the human heart|vaccines|renewable energy|world trade|the Silk Road|antibiotics|time management|\
public speaking|running a marathon|yoga|photography|oil painting|poetry|the solar system|DNA|\
quantum computers|neural networks|blockchain|the water cycle|coral reefs|bees|wolves|elephants|\
penguins|dinosaurs|earthquakes|hurricanes|the Great Wall of China|the pyramids of Egypt|\
the moon landing|World War II|the Industrial Revolution|democracy|inflation|supply and demand|\
taxes|credit cards|retirement savings|job interviews|remote work|teamwork|leadership|\
conflict at work|customer service|email etiquette|social media|online privacy|passwords|\
video games|board games|soccer|basketball|tennis|swimming|cycling|hiking|camping|sailing|\
cooking pasta|making coffee|tea ceremonies|vegetarian food|street food in Thailand|\
travel to Japan|a week in Paris|Iceland|New Zealand|Brazil|Kenya|national parks|museums|\
libraries|public transport|bridges|skyscrapers|interior design|woodworking|knitting|origami|\
learning Spanish|learning the guitar|playing the piano|classical music|hip hop|film making|\
science fiction|fairy tales|mythology|Shakespeare|detective novels|comic books|\
history of the internet|operating systems|databases|sorting algorithms|binary search|recursion|\
graph theory|prime numbers|probability|statistics|linear algebra|calculus|triangles|fractions|\
Newton's laws|electricity|magnetism|light and lenses|sound waves|the periodic table|\
acids and bases|plastic recycling|water pollution|air quality|deforestation|endangered species|\
organic farming|sleep|stress|healthy breakfasts|sugar|vitamins|back pain|first aid|dental care|\
pets|adopting a dog|training a cat|aquariums|parenting|birthday parties|weddings|friendship|\
gratitude|honesty|courage|creativity|curiosity|artificial intelligence in schools|robots|\
self-driving cars|drones|3D printing|space tourism|smartphones|noise in cities|tourism|\
minimum wage|volunteering|school uniforms|homework|university life|writing a resume|\
starting a small business|marketing on a budget|product design|user interviews|project planning|\
cloud computing|open source software|version control|unit tests|APIs|web design|cybersecurity|\
data privacy laws|the printing press|the compass|steam engines|antarctica|deserts|rain forests|\
rivers|islands|clouds|rainbows|comets|seasons|leap years|calendars|maps|languages of the world|\
sign language|handwriting|typography|color theory|optical illusions|memory techniques|\
speed reading|note taking|mind maps|debating|philosophy of mind|ethics|happiness|free will|\
dreams|humor|magic tricks|puzzles|riddles|crossword puzzles|card games|kites|balloons|toys|\
snowboarding|surfing|horse riding|fishing|bird watching|stargazing|mushrooms|spices|chocolate|\
cheese|bread|rice|soup|salads|barbecue|ice cream|juice|wine|sustainable fashion|sneakers|\
perfume|jewelry|haircuts|tattoos"""
FORMS = """\
Explain {} in simple words.
Write a short essay about {}.
What are the advantages and disadvantages of {}?
Give me ten facts about {}.
Write a poem about {}.
Write a dialogue between two friends about {}.
How would you teach a child about {}?
Compose a professional email to a colleague about {}.
Write a blog post about {}, with a title and sections.
What are common mistakes people make about {}, and how can they be avoided?
List five questions that a beginner may ask about {}, and answer each.
Imagine you are an expert on {}. Introduce yourself and give your best advice.
Summarize the history of {} in one paragraph.
Write a step-by-step guide to {}.
Describe a scene that has to do with {}. Use vivid language.
Compare {} with {}.
Create a table with three columns about {}: name, description, example.
Argue for and against {} in a balanced way.
Write a story that begins with {} and ends with {}.
Draft an announcement about {} for a newsletter.
Pretend you are a famous scientist and talk about {}.
Give an analogy that connects {} and {}.
What will {} look like in 50 years?
Write three multiple-choice questions about {} with the right answers.
Write a product review about something to do with {}.
Make an outline for a speech on {}.
Extract the main ideas: "{} changed the way people live. Some like it, \
others do not, and most never think about it."
Translate this sentence to French and German: "I would like to know more about {}."
Answer in JSON: give a title, three keywords and a one-sentence summary about {}.
What can we learn from {}?"""


def questions(folder: Path, choose: random.Random) -> Iterator[KindAndPrompt]:
    texts = [row["question"] for row in read_rows(folder, "gsm8k_train.jsonl")]
    for question in texts:
        yield "gsm8k", question
    for question in choose.sample(texts, min(STYLED, len(texts))):
        yield "gsm8k-styles", choose.choice(STYLES).format(question)


def instructions(folder: Path) -> Iterator[KindAndPrompt]:
    for row in read_rows(folder, "self_instruct_seed_tasks.jsonl"):
        for instance in row["instances"][:2]:
            yield "self-instruct", instructed(row, instance)


def exercises(folder: Path) -> Iterator[KindAndPrompt]:
    for row in read_rows(folder, "exercism_python.jsonl"):
        yield "exercism", exercise(row)
        for task in CODE_TASKS:
            yield "exercism", f"{task}\n\n{fenced(row['solution'])}"


def small_problems(folder: Path) -> Iterator[KindAndPrompt]:
    for row in mbpp_rows(folder):
        tests = "\n".join(row["test_list"][:2])
        yield "mbpp", row["text"]
        yield "mbpp", f"{row['text']} Your code should pass these tests:\n\n{tests}"
        if stub := problem_stub(row):
            yield "stubs", f"{STUB_TASK}\n\n{stub}"


def problem_stub(row: dict) -> str | None:
    """Make a stub of a problem's function; text and examples are its docstring."""
    try:
        nodes = ast.parse(row["code"]).body
    except SyntaxError:
        return None
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    if not functions:
        return None
    examples = [found for test in row["test_list"] if (found := EXAMPLE.match(test))][:2]
    text = TASK_VERB.sub("", row["text"])
    lines = [text[0].upper() + text[1:]]
    for example in examples:
        lines += [f">>> {example[1]}", example[2]]
    return stub_of(functions[-1], lines)


def stub_of(function: ast.FunctionDef, docstring: list[str]) -> str:
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    text = "\n".join("    " + line if line else "" for line in docstring).strip()
    head = f"def {function.name}({ast.unparse(function.args)}){returned}:"
    return f'{head}\n    """ {text}\n    """\n'


def documented_functions(name: str) -> list[str]:
    """Make stubs of a package's documented functions."""
    return [
        stub_of(node, docstring.splitlines())
        for source in package_sources(name)
        for node in parsed(source)
        if isinstance(node, ast.FunctionDef)
        and (docstring := ast.get_docstring(node))
        and 60 < len(docstring) < 700
        and len(node.body) > 1
        and is_plain(node)
    ]


def parsed(source: str) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse(source))
    except SyntaxError:
        return iter(())


def is_plain(function: ast.FunctionDef) -> bool:
    """Return whether this is a public function with a parameter, and no method or test."""
    named = function.args.args
    public = not function.name.startswith(("_", "test"))
    return public and bool(named) and named[0].arg not in ("self", "cls")


def package_stubs(packages: list[str], choose: random.Random) -> Iterator[KindAndPrompt]:
    for package in packages:
        name, _, count = package.partition("=")
        stubs = documented_functions(name)
        for stub in choose.sample(stubs, min(int(count), len(stubs))):
            yield "stubs", f"{STUB_TASK}\n\n{stub}"


def general_talk(choose: random.Random, count: int) -> Iterator[KindAndPrompt]:
    topics, forms = TOPICS.split("|"), FORMS.splitlines()
    texts: set[str] = set()
    while len(texts) < count:
        form = choose.choice(forms)
        texts.add(form.format(*choose.sample(topics, form.count("{}"))))
    for text in sorted(texts):
        yield "general", text


def all_prompts(args: argparse.Namespace, choose: random.Random) -> Iterator[KindAndPrompt]:
    yield from questions(args.datasets, choose)
    yield from instructions(args.datasets)
    yield from exercises(args.datasets)
    yield from small_problems(args.datasets)
    yield from package_stubs(args.packages.split(), choose)
    yield from general_talk(choose, GENERAL)


def records(args: argparse.Namespace, choose: random.Random, count: Counter) -> list[dict]:
    tokenizer = load_tokenizer(resolve_model(args.model, print))
    greedy, sampled = [], []
    for kind, text in all_prompts(args, choose):
        if args.limit is not None and count[kind] >= args.limit:
            continue
        messages = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        token_ids = list(tokenizer.encode(chat, add_special_tokens=False))
        if len(token_ids) > args.max_tokens:
            continue
        count[kind] += 1
        greedy.append({"prompt_token_ids": token_ids, "temperature": 0.0})
        for seed in range(1, SAMPLES[kind] + 1):
            sampled.append({"prompt_token_ids": token_ids, "temperature": 0.7, "seed": seed})
    choose.shuffle(greedy)
    choose.shuffle(sampled)
    return greedy + sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--model", default="smollm2", help="model of the tokenizer and chat template"
    )
    parser.add_argument("--max-tokens", type=int, default=700, help="maximum tokens per prompt")
    parser.add_argument(
        "--packages", default=PACKAGES, help="packages and their numbers of functions, NAME=COUNT"
    )
    parser.add_argument("--limit", type=int, help="maximum prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Old code has invalid escapes, which warn when parsed.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    count: Counter[str] = Counter()
    rows = records(args, random.Random(args.seed), count)
    with gzip.open(args.output, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    lengths = [len(row["prompt_token_ids"]) for row in rows]
    kinds = ", ".join(f"{number} {kind}" for kind, number in count.items())
    print(f"{len(rows)} answers to {count.total()} prompts ({kinds})")
    print(f"{sum(lengths)} prompt tokens, the longest prompt has {max(lengths, default=0)}")


if __name__ == "__main__":
    main()
