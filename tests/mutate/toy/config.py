"""The toy's configuration, see ../config.py."""
import os

ROOT = os.path.dirname(os.path.abspath(__file__))
INCLUDE = "include"
WATCHED = ["."]
LEAST_RATE = 0.95
HEADERS = ["*.hpp"]
TESTS = ["check.cpp"]
LEFT_OUT_TESTS = {}
FIRST = []
MAIN = None
FOLDERS = []
FLAGS = ["-std=c++20", "-O1", "-w", "-fmax-errors=0"]
DEFINES = []
NATIVE = []
DECLARED = None
VARIANTS = {}
ARGUMENTS = []
ENVIRONMENT = {}
MEMORY_KB = 4 << 20
SLACK_SECONDS = 0.5
SURVEY_SECONDS = 60
EXCLUDED = []
EXPLAINED = []
