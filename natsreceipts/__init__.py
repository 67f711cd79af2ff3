"""Tool-call receipts for AI agents on NATS JetStream."""
