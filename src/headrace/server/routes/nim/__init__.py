"""The management routes of NIM: `/v1/metadata`, `/v1/version`, `/v1/manifest`, …"""
