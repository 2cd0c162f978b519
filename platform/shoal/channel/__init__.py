"""How our processes talk: typed calls that survive a cut connection (`rpc`), connections whose end is noticed at once
(`connection`), objects with their arrays (`packing`), and memory that several processes map (`memory`)."""
