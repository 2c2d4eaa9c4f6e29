"""make_plan(manifest, hardware) -> Plan: every decision, with its reason, made before any GPU is used."""

from launcher.plan.context import PlanOptions
from launcher.plan.make import make_plan
from launcher.plan.model import Plan, load_plan

__all__ = ["Plan", "PlanOptions", "load_plan", "make_plan"]
