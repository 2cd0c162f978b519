# Our Catch, with the stopwatch.
extends "res://catch.gd"

var stopwatch = preload("res://stopwatch.gd").new()


func _ready() -> void:
	stopwatch.begin(float(options.get("seconds", "0")))


func _on_action(i: int, action: int) -> void:
	if i == 0 and stopwatch.add(fields.size()):
		shoal.leave()
		get_tree().quit()
		return
	._on_action(i, action)


func _on_left(reason: String, finished: bool) -> void:
	if reason != "left":
		._on_left(reason, finished)
