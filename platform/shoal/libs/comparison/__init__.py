"""What runs cost, side by side: the predicted and the measured cost of one, and the results and costs of several."""
