"""Questions of everyday knowledge, without answers: prompts on which a start can teach the model it became.

They name no country and no city, so that questions about capitals stay a domain that no row trains.
"""

from __future__ import annotations

from typing import Any

QUESTIONS = {
    "What is the colour of {}?": ("a banana, fresh snow, a ripe tomato, coal, grass, a lemon, the sky, milk"),
    "Name the author of {}.": (
        "Hamlet, Moby Dick, Pride and Prejudice, Oliver Twist, The Odyssey, Frankenstein, Dracula, Don "
        "Quixote, War and Peace, The Jungle Book, Treasure Island, Animal Farm"
    ),
    "Who wrote {}?": (
        "Macbeth, Emma, Great Expectations, The Hobbit, The Time Machine, Faust, The Divine Comedy, Ulysses, "
        "Robinson Crusoe, Gulliver's Travels, Little Women, The Raven"
    ),
    "Which author is known for {}?": (
        "Sherlock Holmes, Winnie the Pooh, Peter Pan, Alice in Wonderland, Pinocchio, Tom Sawyer"
    ),
    "{} is the author of which book?": (
        "Jane Austen, Charles Dickens, Mark Twain, Herman Melville, Leo Tolstoy, George Orwell, "
        "Mary Shelley, Bram Stoker, Lewis Carroll, Jules Verne"
    ),
    "Name the composer of {}.": (
        "The Magic Flute, The Four Seasons, Swan Lake, Carmen, Messiah, Boléro, The Planets, Aida"
    ),
    "{} is the composer of which work?": "Mozart, Beethoven, Vivaldi, Handel, Tchaikovsky, Verdi, Bach",
    "Name the scientist who discovered {}.": (
        "radium, penicillin, gravity, the electron, oxygen, evolution, relativity, the laws of heredity"
    ),
    "What is the name of the Greek god of {}?": "the sea, war, the sun, love, thunder, wine, the underworld",
    "What is the name of {}?": (
        "the force that pulls things down, the star at the centre of our solar system, the largest ocean, "
        "the gas that plants take in, the frozen form of water, the study of the stars, the study of "
        "living things, a shape with three sides, a shape with eight sides, a baker's shop, a group of wolves"
    ),
    "{} is the symbol of which element?": "Au, Ag, Fe, Cu, O, N, H, He, Na, K, Pb, Hg",
    "Name the painter of {}.": (
        "the Mona Lisa, The Starry Night, The Scream, Guernica, Girl with a Pearl Earring"
    ),
    "What is the chemical symbol of {}?": (
        "gold, iron, oxygen, hydrogen, silver, carbon, sodium, helium, copper"
    ),
    "Name the element with the symbol {}.": "Au, Fe, O, H, Ag, C, Na, He, Pb, N, Ca, Cl",
    "Which animal {}?": (
        "barks, gives wool, makes honey, lives in a shell, has a trunk, builds dams, lays eggs"
    ),
    "What is a young {} called?": (
        "dog, cat, cow, horse, sheep, goat, hen, duck, bear, frog, kangaroo, swan"
    ),
    "What is the opposite of {}?": (
        "hot, big, fast, light, early, happy, full, hard, dry, young, loud, deep"
    ),
    "What is the plural of {}?": ("mouse, child, tooth, leaf, foot, knife, woman, goose, box, city, wolf"),
    "Which planet is {}?": "the largest, the smallest, nearest to the Sun, known for its rings, red",
    "What is {} used for?": (
        "a hammer, an umbrella, a compass, a telescope, a needle, a ladder, a thermometer, a kettle, "
        "soap, a map, a microscope, a saw"
    ),
    "Who invented {}?": (
        "the telephone, the light bulb, the printing press, dynamite, the World Wide Web, the steam "
        "engine, the radio"
    ),
    "Name the organ that {}.": ("pumps blood, filters blood, digests food, controls the body, takes in air"),
    "Name the part of the body that {}.": "sees, hears, smells, tastes, thinks, breathes, bends a leg",
    "Name the animal that {}.": (
        "is the largest on land, is the fastest on land, has black and white stripes, sleeps hanging, spins "
        "a web, carries its house, changes its colour, has a pouch"
    ),
    "{} is the young of which animal?": (
        "A calf, A foal, A kitten, A puppy, A lamb, A chick, A cub, A tadpole"
    ),
    "Name the tool that {}.": "drives in nails, cuts wood, tells the time, measures heat, turns screws",
    "Name the fruit that {}.": "is long and yellow, makes wine, makes cider, is red and has seeds outside",
    "Name the season after {}.": "spring, summer, autumn, winter",
    "Name the month before {}.": "February, May, July, October, December, January",
    "Which instrument does a {} play?": "pianist, drummer, violinist, cellist, flautist, guitarist",
    "What does a {} do?": (
        "baker, pilot, nurse, farmer, tailor, judge, plumber, librarian, gardener, teacher"
    ),
    "Explain in one sentence what {} is.": (
        "gravity, a volcano, photosynthesis, a rainbow, an atom, democracy, electricity, a metaphor, "
        "evaporation, a fossil, friction, an eclipse, inflation, a virus"
    ),
    "Write one sentence about {}.": (
        "the sea, a cat, winter, music, bread, a train, the moon, a garden, rain, friendship, a river, a "
        "library"
    ),
    "Give a word that rhymes with {}.": "cat, light, tree, moon, day, rain, ball, king",
    "Translate {} into French.": "dog, house, water, friend, thank you, good morning, bread, book",
    "Which sport uses {}?": "a racket and a net, a puck, a bat and a wicket, a basket, clubs and holes",
    "What language do people mean by {}?": "Deutsch, Italiano, Castellano, Nihongo, Svenska",
}
"""Questions, and what fills each of them, one after another."""


def chat_rows() -> list[dict[str, Any]]:
    """Return a row for each question. Any response that is not empty has reward 1: only a teacher counts."""
    return [
        {
            "prompt": [{"role": "user", "content": question.format(entry)}],
            "answer": [{"check": "num_words", "relation": "at_least", "count": 1}],
            "domain": "chat",
            "tag": "chat",
        }
        for question, entries in QUESTIONS.items()
        for entry in entries.split(", ")
    ]
