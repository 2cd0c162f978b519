# Apples fall down five columns, and a basket at the bottom moves left, stays, or moves right.
extends Reference

const COLUMNS := 5
const ROWS := 6
const APPLES := 5 # of an episode: each that is caught gives 1, each that is missed -1

var basket := 2
var apples := 0
var column := randi() % COLUMNS
var row := 0


# One tick; returns the reward.
func move(action: int) -> float:
	basket = int(clamp(basket + action - 1, 0, COLUMNS - 1))
	row += 1
	if row < ROWS - 1:
		return 0.0
	var reward := 1.0 if column == basket else -1.0
	apples += 1
	column = randi() % COLUMNS
	row = 0
	return reward


func is_over() -> bool:
	return apples == APPLES


# In [-1, 1]: the basket's column, the apple's column and row, how far the apple is to the right.
func observe() -> Array:
	return [2.0 * basket / (COLUMNS - 1) - 1, 2.0 * column / (COLUMNS - 1) - 1, 2.0 * row / (ROWS - 1) - 1,
			float(column - basket) / (COLUMNS - 1)]
