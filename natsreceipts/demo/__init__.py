"""``natsreceipts demo``: workers that are killed in the middle of their calls, and an inbox that counts."""
