"""Asynchronous and elastic training: parameter servers, local SGD, DiLoCo, workers that join, Hogwild, peers."""
